"""Mutations of the source that tests must notice: `table` names them, `python -m tests.mutations` tries them.

A mutation breaks one rule of the product in one place. It is killed if a test fails because of it, and it
survives if all its tests pass. Nothing in the working tree changes: each is tried in a copy of the tree.
"""
