"""Live display of a run in a notebook, which stays in the saved notebook as a picture.

``picture`` is pure. Only ``widget`` imports anywidget and IPython, which the extra ``notebook`` brings.
"""
