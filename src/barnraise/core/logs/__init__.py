"""Log files on disk: rotation, and the audit log of what changed trust and ran code on this machine."""
