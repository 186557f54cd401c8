"""The supervisor: one process per run and machine; starts workers, keeps their output, stops them.

It outlives nothing: if the agent's pipe closes, it kills all that it started. If it is killed itself, its
workers die with it. It must start fast and stay small. Hence the process imports only the standard library,
msgspec and ``barnraise.core`` (psutil only for some limits; `orphans` runs in the agent).
"""
