"""Adapters that let other libraries work in a session: `integrations.transformers`, `integrations.lm_eval`.

Each module imports the library that it adapts. Nothing else in Barnraise does.
"""
