"""Adapters for other libraries: Transformers, Fabric and lm_eval in a session, and Optuna beside it.

Each module imports the library that it adapts. Nothing else in Barnraise does.
"""
