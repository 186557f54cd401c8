"""Charts of a run as SVG elements: curves, timeline, phases, network. Pure.

A chart uses classes and presentation attributes only: it works under a strict content security policy.
`theme` has the style sheet of the classes. Colours are never the only sign.
"""
