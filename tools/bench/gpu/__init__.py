"""What a GPU alone can tell, in twenty minutes: python -m tools.bench.gpu (docs/gpu.md). Each part is a program of its own."""
