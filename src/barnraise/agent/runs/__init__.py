"""Runs on this machine, built like a Kubernetes controller: a spec, reports as status, and a reconcile loop.

The user's `RunSpec` is the spec and each machine's `NodeReport` is the status. The coordinator's controller
reconciles them into the next `RunRecord`, and every machine's executor follows that record. The pure
decisions are in `barnraise.runs.control`.
"""
