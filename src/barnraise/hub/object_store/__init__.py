"""Blobs in an S3 bucket: the hub uploads them, members download them. Everything here is optional."""
