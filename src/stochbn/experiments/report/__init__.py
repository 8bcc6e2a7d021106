"""Prediction files → tables, figures and one page."""
