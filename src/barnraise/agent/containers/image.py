"""The container image of a run: its name, its download, and the check that workers can start in it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import barnraise
from barnraise.agent.containers.engine import (
    SHOWN_LINES,
    ContainerEngine,
    OnProgress,
    output_of,
    run_program,
)
from barnraise.core.errors import RunEnvironmentError
from barnraise.core.installation import dockerfile_hint

STATE_INSIDE = "/run/barnraise"
PYTHON = "python"  # the first one on the PATH of the image
_PULL_S = 3600.0
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
CHECK_PROGRAM = f"""\
import barnraise
print("barnraise", barnraise.__version__, flush=True)
from pathlib import Path
from barnraise.agent_client.bootstrap import standing_of
print("agent", "absent" if standing_of(Path({STATE_INSIDE!r})) is None else "answers")
"""


def check_arguments(image: str, paths: Sequence[str]) -> None:
    """Raise RunEnvironmentError for an image or path that a command line would misread. Pure."""
    if not _IMAGE.fullmatch(image):
        raise RunEnvironmentError(
            f"{image!r} is not the name of an image",
            hint="Name it as `docker images` does, for example: --container me/trainer:1",
        )
    for path in paths:
        if ":" in path or not os.path.isabs(path):
            raise RunEnvironmentError(
                f"cannot mount {path} in a container: the path must be absolute and without a colon",
                hint="Move or rename it, or run without --container.",
            )


async def ensure_image(engine: ContainerEngine, image: str, on_progress: OnProgress) -> None:
    """Pull the image unless this machine has it; raise RunEnvironmentError if that fails."""
    if await output_of(engine.program, "image", "inspect", image) is not None:
        return
    on_progress(f"pulling the image {image}")
    command = (engine.program, "pull", image)
    code, lines = await run_program(command, os.environ, _PULL_S, f"pulling the image {image}", on_progress)
    if code != 0:
        output = "".join(f"\n    {line}" for line in lines[-SHOWN_LINES:])
        raise RunEnvironmentError(
            f"the image {image} is not on this machine and could not be pulled{output}",
            hint=f"Build it here, or see why this fails: {Path(engine.program).name} pull {image}",
        )


def check_result(image: str, code: int, lines: Sequence[str]) -> None:
    """Raise RunEnvironmentError unless the output of `CHECK_PROGRAM` shows that workers can start. Pure."""
    facts = dict(line.split(" ", 1) for line in lines if re.fullmatch(r"(barnraise|agent) \S+", line))
    version, own_version = facts.get("barnraise"), barnraise.__version__
    output = "".join(f"\n    {line}" for line in lines[-SHOWN_LINES:])
    if version is None and code == 125:
        hint = "Fix what the lines above name, then run again."
        if re.search(r"gpu|nvidia", output, re.IGNORECASE):
            hint = "Install the NVIDIA Container Toolkit on this machine, then restart its Docker or Podman."
        raise RunEnvironmentError(f"cannot start a container of the image {image}{output}", hint=hint)
    if version is None:
        raise RunEnvironmentError(
            f"the image {image} does not have Barnraise{output}", hint=dockerfile_hint()
        )
    if version != own_version:
        raise RunEnvironmentError(
            f"the image {image} has Barnraise {version}, and this machine runs {own_version}",
            hint=dockerfile_hint(),
        )
    if facts.get("agent") != "answers":
        raise RunEnvironmentError(
            f"a container of the image {image} does not reach this machine's agent{output}",
            hint="Use Docker Engine or Podman of this system itself, without a virtual machine and without "
            "`userns-remap`, or run without --container.",
        )
