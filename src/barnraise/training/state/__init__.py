"""The training state: model, optimizers and schedulers as one value, and the checkpoints that store it.

The transfer of the state between workers belongs to `recovery`, file formats to `checkpoint`.
"""
