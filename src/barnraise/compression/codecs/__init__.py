"""TODO: codecs."""
