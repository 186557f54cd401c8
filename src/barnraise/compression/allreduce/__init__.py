"""All-reduces of encoded tensors over a process group: sharded, hierarchical, error feedback, DDP hook.

The encodings themselves belong to ``codecs``.
"""
