"""The `stochbn` command."""
