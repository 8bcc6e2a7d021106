"""The `stochbn` command: the paper's experiments from data to page, and SBN for a network of your own."""
