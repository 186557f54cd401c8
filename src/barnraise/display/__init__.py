"""Pictures of a run: charts as SVG, the report as one HTML file, and the live display of notebooks.

May import ``history`` and what is below it; never torch. ``charts`` and ``report`` are pure: they turn a
`RunView` into text, and the page of the agent uses the same charts.
"""
