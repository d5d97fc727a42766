"""A fast forward and backward pass for small Llamas in float32 on CPU cores."""
