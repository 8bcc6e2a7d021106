"""A model and its data → what it may be trusted with, as numbers and as one page."""
