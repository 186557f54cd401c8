"""Training steps of one worker: micro-batch assignment, all-reduce, commit vote, commit, and regrouping.

Gradient buffers belong to `gradients`, the transfer of the state to `recovery`.
"""
