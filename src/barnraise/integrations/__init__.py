"""Adapters that let other libraries' training loops run in a session: `integrations.transformers`.

Each module imports the library that it adapts. Nothing else in Barnraise does.
"""
