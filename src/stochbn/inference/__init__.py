"""Draws × model × inputs → a prediction."""
