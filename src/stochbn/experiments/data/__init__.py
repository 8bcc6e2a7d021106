"""Data sets, fetched and verified."""
