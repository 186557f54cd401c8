"""Real processes that die, sleep, disagree or lie. The workers are forked from one nursery (``nursery``)."""
