"""The command line is a frozen list: users' scripts depend on every verb and option."""

from __future__ import annotations

from collections.abc import Iterator

import click

from barnraise.cli.main import app

_JSON = {"--json"}
_PLANS = {"--add", "--sync", "--levels", "--picture", "--no-project-file", *_JSON}
_RUN_OPTIONS = {
    *("--on", "--per-node", "--min-nodes", "--wait", "--env", "--engine", "--trust-fabric", "--restarts"),
    *("--quiet", "--nice", "--memory", "--container", "--sandbox", "--name"),
}
_RUN = {
    *("script", "arguments", "--data", "--model", "--set", *_RUN_OPTIONS),
    *("--folder", "--all", "--detach", "--dry-run", "--separate", *_PLANS),
}
FROZEN = {
    "accept": {"run", "--yes", "--refuse", "--no-sandbox", *_JSON},
    "adapt": {"script", "--write"},
    "attach": {"run", "--all"},
    "audit": {"--since", "--limit", *_JSON},
    "clean": {"run", "--all", "--dry-run", "--yes", *_JSON},
    "completion": {"shell"},
    "explain": {"code"},
    "help": {"command"},
    "version": set(),
    "checkpoint reshard": {"sources", "target", "--into", "--step", "--safetensors", "--prefix"},
    "continue": {"--without", *_JSON},
    "doctor": {"--all", *_JSON},
    "down": _JSON,
    "eval": {
        *("--on", "--per-node", "--min-nodes", "--wait", "--env", "--engine", "--trust-fabric", "--restarts"),
        *("--set", "--quiet", "--nice", "--memory", "--container", "--sandbox", "--name"),
        *("--model", "--kind", "--model-args", "--tasks", "--include-path", "--num-fewshot", "--limit"),
        *("--batch-size", "--requests", "--output", "--no-project-file"),
    },
    "export": {"run", "folder", "--adapter", "--merged", "--base"},
    "hub expel": {"member", "--name"},
    "hub export": {"folder", "--name"},
    "hub follow": {"invite", "--name", "--host", "--port"},
    "hub hand-over": {"node", "--name", "--for", "--revoke"},
    "hub pardon": {"member", "--name"},
    "hub status": {"--name", *_JSON},
    "hub up": {
        *("script", "arguments", "--name", "--host", "--port", "--address", "--uses", "--round", "--codec"),
        *("--train", "--no-train", "--parent", "--seats", "--folder", "--plain"),
        *("--wait-for", "--quorum", "--max-staleness", "--linear-scaling", "--rounds"),
        *("--store", "--store-endpoint", "--held-out", "--proxied"),
    },
    "hub take-over": {"word", "--name"},
    "id": set(),
    "identity rotate": {"--yes", *_JSON},
    "invite": {
        *("--name", "--uses", "--for", "--stranger", "--mirror", "--region", "--address"),
        *("--list", "--revoke"),
    },
    "join": {
        *("code", "--at", "--guest", "--invite", "--yes", "--name", "--keep", "--quiet", "--site"),
        *("--no-sandbox", *_JSON),
    },
    "leave": {"--yes", *_JSON},
    "limit": {
        *("--cpus", "--memory", "--gpu-memory", "--rate", "--hours", "--battery", "--metered"),
        *_JSON,
    },
    "listen": {"--port", "--trust", "--until-idle"},
    "logs": {"run", "--rank", "--all", "-f", "--follow"},
    "metrics": {"name", "--watch", *_JSON},
    "nodes": _JSON,
    "notify add": {"target", "--on", "--token", "--smtp", "--user", "--from", *_JSON},
    "notify list": _JSON,
    "notify remove": {"name", *_JSON},
    "notify test": {"name", *_JSON},
    "open": {"--on", "--print", *_JSON},
    "pair": {"--guest", "--wait", "--no-wait", "--machines", "--yes", *_JSON},
    "pause": {"machine", "--for", *_JSON},
    "plan": {
        *("--parameters", "--config", "--base", "--batch", "--tokens", "--flops-per-sample"),
        *("--seconds-per-sample", "--on"),
        *_PLANS,
    },
    "ps": {"run", "--all", *_JSON},
    "psk new": {"--guest", "--output", *_JSON},
    "queue add": {
        *("script", "arguments", "--each", "--after", "--priority", "--needs", "--retries", "--metric"),
        *("--best", *_RUN_OPTIONS, "--data", "--model", "--folder", "--separate", "--dry-run"),
        *("--no-project-file", *_JSON),
    },
    "queue cancel": {"jobs", "--all", *_JSON},
    "queue clear": {"jobs", *_JSON},
    "queue list": {"--all", *_JSON},
    "queue move": {"job", "--before", "--last", "--priority", *_JSON},
    "queue pause": {"jobs", *_JSON},
    "queue results": {"jobs", "--wait"},
    "queue resume": {"jobs", *_JSON},
    "rename": {"name", *_JSON},
    "report": {"run", "--into", "--price"},
    "resume": {"run", "--on", "--set", "--all", "--detach"},
    "resume-machine": {"machine", *_JSON},
    "runs compare": {"runs", *_JSON},
    "runs history": {"run", *_JSON},
    "runs remove": {"runs", "--yes", *_JSON},
    "run": _RUN,
    "self-test": set(),
    "service install": _JSON,
    "service remove": _JSON,
    "service status": _JSON,
    "settings": set(),
    "status": {"--graph", "--measure", *_JSON},
    "stop": {"run", "--hard", *_JSON},
    "torch": {"--install", "--yes"},
    "uninstall": {"--yes", "--hard"},
    "unpair": {"node", "--yes", *_JSON},
    "up": {"--detach", "--psk-file", "--witness"},
    "track": {"run", "--to"},
    "watch": {"run"},
}
GLOBAL_OPTIONS = {"--version"}


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _options(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_verbs_and_options_are_frozen() -> None:
    assert {name: _options(command) for name, command in _commands(app)} == FROZEN


def test_global_options_are_frozen() -> None:
    assert _options(app) == GLOBAL_OPTIONS


def test_every_verb_says_what_it_does() -> None:
    for name, command in _commands(app):
        assert command.help, name
