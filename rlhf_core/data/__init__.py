"""Data as later stages know it: the canonical schema, hashes and splits, batches, token tables, judges, and the built-in clerk."""
