"""The flow `iterative-dpo`."""
