"""Checkpoints: whole or absent, hashed, and readable without running anything that is in them."""
