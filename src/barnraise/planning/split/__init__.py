"""Split of a model over machines: which of them holds which blocks, what a step takes, and the rivals."""
