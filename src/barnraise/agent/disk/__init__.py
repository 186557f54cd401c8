"""Disk space of this machine: how much Barnraise uses, what is not needed any more, and its removal.

Decisions are pure; the agent applies them, because only it knows which runs are active.
"""
