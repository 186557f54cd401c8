"""Folders on disk to manifests and back: ignore rules, portable names, hashes, unpacking, results.

Contents by hash belong in ``store``.
"""
