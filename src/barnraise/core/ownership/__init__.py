"""Checks that a directory or file belongs to this user and that no other user may change it.

Pure rules for Unix and for access lists of Windows, and one module that reads the file system for them.
"""
