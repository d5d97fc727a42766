"""The model registry, which is kept in git tags."""
