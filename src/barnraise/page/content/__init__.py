"""What the page shows besides its templates: drawings, data of charts, comparisons and found lines."""
