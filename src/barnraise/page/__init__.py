"""The page of a machine: HTML of its runs on loopback, access to it, and its updates.

May import ``history``, ``agent_client``, ``core``, and the limits for slow clients of ``hub``; never torch.
The agent serves the page and answers its requests (`agent.page`).
"""
