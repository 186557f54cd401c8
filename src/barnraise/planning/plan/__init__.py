"""Plans made from the cost model: ranking, reasons, advice, calibration and drift.

Arithmetic of links and steps belongs in ``cost``.
"""
