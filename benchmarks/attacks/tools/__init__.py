"""Tools of an attacker: what it sends from its own host; the attacks of ``catalog`` use them."""
