"""A hub's directory: event log, blobs, versions, lock, creation and export."""
