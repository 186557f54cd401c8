"""Handlers of the agent's local API, for the command line and for workers.

They only translate: decisions belong to the services of the agent.
"""
