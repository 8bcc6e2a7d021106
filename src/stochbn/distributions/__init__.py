"""Statistics → a distribution over the BatchNorm buffers → draws."""
