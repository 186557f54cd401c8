"""What a person types: one file per verb, put together in ``main``.

May import every torch-free package; each verb imports what it needs when it runs, so that the start stays
fast and torch is never loaded into this process.
"""
