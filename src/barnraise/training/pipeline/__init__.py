"""Training of a model that is split over machines: each holds a run of its blocks, as one stage.

Where the blocks go is a pure function (``planning.split.stage_placement``). The schedule of the micro-batches
is that of ``torch.distributed.pipelining``.
"""
