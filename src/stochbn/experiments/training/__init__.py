"""Recipe and seed → trained network."""
