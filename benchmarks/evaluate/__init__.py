"""Speed and exactness of maps on unequal machines, with kills."""
