"""A batch → the mean and log(σ² + ε) of every BatchNorm layer."""
