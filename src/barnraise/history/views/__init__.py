"""Parts of the read model that follow from one kind of entries: events, and measurements."""
