"""Recovery: how a worker gets the training state from other workers, and how it exits on failures.

When a group recovers is decided in `steps`; checkpoints on disk belong to `state` and `checkpoint`.
"""
