"""Workers in containers: the engine (Docker or Podman), the image, and the containers of a run.

Nothing here knows of runs of other machines or of the supervisor process.
"""
