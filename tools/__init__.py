"""Programs that are neither a stage nor a test."""
