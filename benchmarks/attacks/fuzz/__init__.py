"""Fuzzing of every parser of bytes from other machines: corpus, mutations, bounds on time and memory."""
