"""Scripts and their Python environments: what a script uses, what machines have, how environments are built.

May import ``topology`` and what is below it. Starting workers does not belong here.
"""
