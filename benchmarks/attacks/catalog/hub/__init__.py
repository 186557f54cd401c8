"""Attacks on a hub, its members and its invites."""
