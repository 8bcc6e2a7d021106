"""Draws × model × batch → the outputs of every draw."""
