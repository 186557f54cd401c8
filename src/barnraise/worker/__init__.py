"""The composition root of a training process, and the short-lived processes that need torch.

May import everything below it, and torch.
"""
