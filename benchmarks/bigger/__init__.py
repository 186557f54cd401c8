"""Fine-tuning of a model that fits on none of the hosts."""
