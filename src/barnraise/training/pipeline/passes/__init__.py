"""Passes of the micro-batches of a step through the stages of a split model.

Their order on each machine is a pure function. The schedules of torch run them, and the activations travel
between machines in the form that the script has chosen.
"""
