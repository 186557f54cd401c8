"""Notifications on one agent: which events of its runs are told, to which targets, and how they get there.

Only the agent of the machine that started a run sends its notices. So no two machines send the same one.
"""
