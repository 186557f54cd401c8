"""The daemon of a machine: finds peers, pairs, keeps the view, and serves command line and workers.

The composition root of everything that runs without torch: it builds concrete services of other packages and
connects them. It may import every package below it that is free of torch.
"""
