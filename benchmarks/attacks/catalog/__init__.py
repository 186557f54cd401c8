"""The attacks, one module for each scene or theme. A new module is found by itself."""
