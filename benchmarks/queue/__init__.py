"""The queue on three hosts of the lab, while a worker, a machine and an agent die."""
