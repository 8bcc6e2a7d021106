"""How fast `stochbn` is: ratios to plain forward passes, measured side by side in one run (`make bench`)."""
