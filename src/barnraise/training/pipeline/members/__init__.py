"""Members of a group that trains a split model: what each of them holds, and how state moves between them."""
