"""Controller of a run, as pure decisions: spec and reports in, next record out.

Reading reports and writing records belongs to ``agent.runs``.
"""
