"""Trained networks → prediction files."""
