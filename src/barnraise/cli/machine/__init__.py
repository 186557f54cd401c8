"""Commands about this machine alone: its limits, settings, key, torch, audit log and self-test."""
