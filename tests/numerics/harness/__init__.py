"""Harness of the multi-process tests: worker pools, inputs that identify ranks, expectations."""
