"""Records of runs on this machine: their logs are written, copied between owners, and served to displays."""
