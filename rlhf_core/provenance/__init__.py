"""What a result was made from: hashes of inputs, lineage, and models by their hash."""
