"""Fine-tuning of a large frozen model on unequal machines."""
