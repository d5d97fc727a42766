"""A fast forward and backward pass for plain Llamas on CPU cores."""
