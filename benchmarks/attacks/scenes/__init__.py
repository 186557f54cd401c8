"""Scenes: real processes under attack, with honest work that goes on meanwhile."""
