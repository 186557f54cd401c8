"""Text of another machine reaches a terminal or a log through one sanitizer, at the seams listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.arch.source_tree import SOURCE, files, module_name

SANITIZER = "barnraise.core.sanitize"
# Where text of a peer enters, and where it is printed once more.
ENTRIES = {
    "identity.trust": "names of machines, in the trust log and in a hello",
    "agent.daemon": "the version of a hello, and events",
    "topology.devices": "system, hardware and notes of a machine",
    "pairing.messages": "texts of a pairing",
    "agent.runs.registry": "reports of guests",
    "agent_client.log_tail": "output of guests' workers",
    "artifacts.packing.portable_names": "names of files",
    "core.decoding": "quotes of malformed messages",
    "environments.compatibility": "findings about a machine's packages",
    "hub.client.client": "errors of a hub",
    "hub.mirror.blob_fetcher": "code of a hub's run",
    "identity.delegation": "names of runs in certificates",
    "rpc.endpoint": "errors of functions on other workers",
}
PRINTERS = {
    "cli.main": "errors",
    "cli.tables": "every table: status, ps, hub status",
    "cli.terminal": "every wrapped sentence: status, nodes, plan, doctor",
    "cli.consent": "the question before code of others runs here",
    "cli.child_process": "lines of hub commands, and the output of a friend's script",
    "cli.doctor.doctor": "fixes",
    "cli.queue.add": "why jobs were not added",
    "cli.queue.change": "what became of a change of jobs",
    "cli.queue.results": "how jobs ended",
    "cli.runs.run": "the end of a run",
    "cli.runs.runs": "ps RUN",
    "cli.runs.run_view": "lines about a run",
    "cli.runs.progress.status_view": "the status line of a run",
    "worker.launch.launch": "lines about a run in a notebook",
    "core.flow.console_log": "logs of agents, hubs and workers",
    "topology.render": "the picture of the links",
}
# Their strings are ASCII or a path of this machine.
OTHER_CHECKS = {"discovery.static", "hub.object_store.redirects"}


def _names(module: str) -> set[str]:
    path = SOURCE / "barnraise" / Path(*module.split("."))
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports if node.module == SANITIZER for alias in node.names}
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return imported & called


@pytest.mark.parametrize("module", [*ENTRIES, *PRINTERS])
def test_seam_uses_the_sanitizer(module: str) -> None:
    assert _names(module), f"{module} shows {({**ENTRIES, **PRINTERS})[module]} without the sanitizer"


def test_no_module_has_a_sanitizer_of_its_own() -> None:
    guilty = {
        module_name(file).removeprefix("barnraise.")
        for file in files()
        if ".isprintable(" in file.read_text(encoding="utf-8")
    }
    assert guilty - OTHER_CHECKS == {"core.sanitize"}


def test_every_log_is_formatted_by_the_sanitizer() -> None:
    """``logging.basicConfig`` elsewhere would write text of peers as it came."""
    guilty = {
        module_name(file) for file in files() if "logging.basicConfig(" in file.read_text(encoding="utf-8")
    }
    assert guilty == {"barnraise.core.flow.console_log"}
