"""The page that this agent serves: its service, and requests of one owner's machine to another's agent."""
