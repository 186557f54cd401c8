"""Pictures of the displays of a real run: terminal, page, notebook and report."""
