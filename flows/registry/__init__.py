"""The registry of models, kept in tags of git."""
