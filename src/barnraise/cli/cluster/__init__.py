"""Commands about this machine and its cluster: up, pair, join, status, settings, torch, self-test."""
