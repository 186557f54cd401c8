"""Worker groups: which workers train together now, and the process group that connects them.

What a step computes and how a worker gets the training state belong to `steps` and `recovery`.
"""
