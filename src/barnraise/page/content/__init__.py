"""Contents of the page besides its templates: drawings, data of charts, comparisons and found lines."""
