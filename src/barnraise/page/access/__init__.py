"""Access to the page: one-time links, sessions, and rules for requests of browsers."""
