"""Transfer of pieces between agents: the schedule of requests, the server, and their messages.

Reading and writing pieces belongs in ``store``.
"""
