"""The base of a split model in its files: which tensors there become which of its parameters."""
