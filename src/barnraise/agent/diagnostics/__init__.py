"""The agent's part of `barnraise doctor`: collect facts, dial peers, and judge the result.

Checks of the machine itself belong to `barnraise.cli.doctor`.
"""
