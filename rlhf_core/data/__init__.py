"""Data: sources, formats, the canonical schema, split, validation, tokenization, batches."""
