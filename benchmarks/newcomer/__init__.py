"""The way of a new user: from the installation to the first step on three machines."""
