"""Commands of ``barnraise queue``."""
