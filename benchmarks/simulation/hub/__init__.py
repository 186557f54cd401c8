"""Simulation of hubs with many members: the real decisions on a fake clock."""
