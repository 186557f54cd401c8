"""The daemon of a machine: finds peers, pairs, keeps the view, serves the command line and the workers.

The composition root of the machine wing: it builds concrete things across packages and connects them. May
import everything below it that is free of torch.
"""
