"""Trackers that follow the record of a run: TensorBoard. Light to import; never imports torch.

`rows` and `schedule` are pure: they decide which step is written when. A tracker module imports the
library that it adapts, and `feeder` connects both with the record.
"""
