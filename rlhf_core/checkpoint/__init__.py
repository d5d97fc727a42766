"""Checkpoints: complete or absent, hashed, and readable without running code from them."""
