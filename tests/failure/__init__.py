"""Tests with real processes that die, stop, disagree or attack. Workers are forked from one fork server."""
