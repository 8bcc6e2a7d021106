"""Predictive uncertainty for any batch-normalised PyTorch network, without retraining it."""
