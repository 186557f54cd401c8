"""Machines of a run: their deaths, and their shares of the samples. Pure."""
