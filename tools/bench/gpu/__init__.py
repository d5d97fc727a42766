"""The GPU check: python -m tools.bench.gpu, at most twenty minutes (docs/gpu.md). Each part is a program."""
