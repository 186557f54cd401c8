"""Trackers of the record of a run: TensorBoard, wandb, Trackio, MLflow. Light to import; never imports torch.

`rows`, `schedule` and `parts` are pure: they decide which step is written when, and where. A tracker module
imports the library that it adapts, and `feeder` connects both with the record.
"""
