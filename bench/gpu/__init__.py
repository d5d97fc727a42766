"""What works on a GPU and how fast: python -m bench.gpu. Each module is a part, a program of its own."""
