"""Split of a model over machines: which of them holds which blocks, which mirrors, and when that changes."""
