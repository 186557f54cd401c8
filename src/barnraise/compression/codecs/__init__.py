"""Codecs: stateless encoders from numbers to bytes, one per module, and PowerSGD.

Communication between members does not belong here.
"""
