"""Origins of a result: hashes of inputs, lineage, and models by hash."""
