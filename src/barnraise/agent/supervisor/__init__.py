"""The warden: one small process per run on a machine that starts its workers, keeps their output, ends them.

It outlives nothing: when the agent's pipe ends it kills all it started, and when it is killed itself its
workers die with it. It must start at once and stay small, so the process imports the standard library,
msgspec and ``barnraise.core`` only (psutil only where a limit needs it; ``leftovers`` runs in the agent).
"""
