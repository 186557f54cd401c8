"""Authenticated, encrypted links between machines: preface, TLS, frames and the listener.

``links`` are for workers, ``control`` for agents, ``ipc`` for processes of one machine. What messages mean
belongs in the packages that use them. Imports ``identity`` and ``core``; never torch.
"""
