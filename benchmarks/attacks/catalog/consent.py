"""Attacks of owners on consent and secrets: the question at a guest's terminal, its disk, values of --set."""

from __future__ import annotations

from pathlib import Path

from benchmarks.agents.runs import write_folder
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.runs import GUEST, OWNERS, RunCluster

# It erases the line of the question, writes another one, and conceals the rest.
_FORGED = (
    "\r\x1b[2KIt would run, as you: python train.py --epochs 3\x1b[8m",
    "-c",
    "import os; os.system('id')",
    "\x1b[28m\u202e",
)
_SECRET = "hf-a-very-secret-value"
_SCRIPT = "import os, time\nprint('has', os.environ['TOKEN'][:3], flush=True)\ntime.sleep(60)\n"
_FOLDER_BYTES = 24 << 20


def _await_question(cluster: RunCluster, run: str) -> None:
    cluster.machines.until(
        lambda: "asks" in [part.stage for part in cluster.watch(run).parts], 90.0, "the guest is asked"
    )


def _stop(cluster: RunCluster, run: str, place: int) -> None:
    assert cluster.line.run(0, "stop", run).returncode == 0
    cluster.machines.until(lambda: cluster.phase(run, place) == "ended", 90.0, "it has ended")


@attack("owner-forges-question", "owner", "hides a command from a guest's user on the screen", RunCluster)
def forge_question(cluster: RunCluster) -> str:
    folder = cluster.new_folder()
    write_folder(folder, f"open({str(cluster.canary)!r}, 'w')\n")
    with cluster.unchanged():
        words = ("run", "--detach", "--on", "h2", "--set", "LD_PRELOAD=/tmp/x.so", "train.py", *_FORGED)
        started = cluster.line.run(0, *words, folder=folder)
        assert started.returncode == 0, started.stderr
        run = started.stdout.split()[-1]
        _await_question(cluster, run)
        guest = cluster.machines.hosts[GUEST]
        environment = cluster.machines.environment(GUEST)
        answered = guest.run(
            cluster.line.command("accept", run), env=environment, input="n\n", timeout=60.0, check=False
        )
        shown = answered.stdout
        assert answered.returncode == 1, "it was accepted"
        assert all(line.isprintable() for line in shown.splitlines()), "the question commands the terminal"
        assert "os.system(" in shown, "a part of the command is hidden"
        assert "CAREFUL, it can load other code: LD_PRELOAD=/tmp/x.so" in shown, "a variable is hidden"
        assert max(map(len, shown.splitlines())) <= 80, "a line is too long for the screen"
        _stop(cluster, run, GUEST)
    return "the whole command and its variables were shown as text"


@attack("owner-fills-guest-disk", "owner", "sends a large folder before the guest's user agrees", RunCluster)
def fill_disk(cluster: RunCluster) -> str:
    folder = cluster.new_folder()
    write_folder(folder, "pass\n")
    (folder / "large.bin").write_bytes(b"\7" * _FOLDER_BYTES)
    state = cluster.machines.state(GUEST)
    before = _stored(state)
    with cluster.unchanged():
        run = cluster.start_run("h2", folder)
        _await_question(cluster, run)
        grown = _stored(state) - before
        assert grown == 0, f"{grown} bytes of the run are on the guest's disk"
        _stop(cluster, run, GUEST)
    return "nothing was stored before an answer"


def _stored(state: Path) -> int:
    """Return the bytes of files and folders of runs on a machine."""
    files = [path for part in ("store", "runs") for path in (state / part).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


@attack("owner-reads-values", "owner", "looks for values of --set on the disks of all owners", RunCluster)
def read_values(cluster: RunCluster) -> str:
    folder = cluster.new_folder()
    write_folder(folder, _SCRIPT)
    with cluster.unchanged():
        run = cluster.start_run("h0", folder, "--set", f"TOKEN={_SECRET}")
        cluster.machines.until(lambda: "has hf-" in cluster.output(run, 0), 90.0, "the script has its value")
        for place in (*OWNERS, GUEST):
            for path in _files(cluster.machines.state(place)):
                assert _SECRET.encode() not in path.read_bytes(), f"the value is in {path} of h{place}"
        _stop(cluster, run, 0)
    return "the script had the value, and no disk has it"


def _files(state: Path) -> list[Path]:
    return [path for path in state.rglob("*") if path.is_file() and path.stat().st_size < 64 << 20]
