"""The handle of the forwarder process: starts it, gives it ports, tells it about paths."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.namespaces import LabError, inside


@dataclass(frozen=True)
class Conditions:
    """Treatment of a packet one way between two ports: seconds, seconds, share."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


class Forwarder:
    """A user-space switch whose ports are TAP devices t0, t1, ... in the given namespace."""

    def __init__(self, namespace: str, conditions: Conditions) -> None:
        script = str(Path(__file__).with_name("forwarder.py"))
        # In the switch's namespace, so that the janitor finds it there.
        self._process = subprocess.Popen(
            inside(namespace, [sys.executable, "-S", "-E", script, json.dumps(asdict(conditions))]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def add_port(self, number: int) -> None:
        self._ask({"port": number})

    def set_path(self, a: int, b: int, conditions: Conditions) -> None:
        self._ask({"path": [a, b], "conditions": asdict(conditions)})

    def set_trunk(self, near: list[int], far: list[int], rate: int, conditions: Conditions) -> None:
        self._ask({"trunk": [near, far], "rate": rate, "conditions": asdict(conditions)})

    def carried(self) -> int:
        """Return the bytes on all trunks, both ways."""
        return self._ask({})

    def wait(self) -> None:
        self._process.communicate()

    def _ask(self, question: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.startswith(b"ok "):
            raise LabError(f"The forwarder failed: {answer.decode().strip() or 'it has ended'}.")
        return int(answer[3:])
