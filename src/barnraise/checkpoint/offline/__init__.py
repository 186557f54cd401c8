"""Work on saved checkpoints without a running program: sharded ones are put together or cut again.

It reads the files of one or more machines from this machine's disk.
"""
