"""Text that a person sees before code of a hub runs here: all of it comes from the hub."""

from __future__ import annotations

from barnraise.artifacts import FolderManifest
from barnraise.cli.hub.code import OfferedCode, shown
from barnraise.hub.protocol.messages import CodeDescription, RoundConfig, RunDescription
from barnraise.identity.keys import NodeKey


def offered(*arguments: str, entry: str = "train.py", store: str | None = None) -> OfferedCode:
    node = str(NodeKey.generate().id)
    description = RunDescription(
        protocol=1, hub=node, name="fireside", owner=node, terms=RoundConfig(), store=store
    )
    code = CodeDescription(entry=entry, arguments=arguments, manifest="0" * 64, contents=())
    return OfferedCode(description, code, FolderManifest(()))


def test_one_argument_cannot_look_like_two() -> None:
    assert "\n  python train.py --epochs 3\n" in shown(offered("--epochs", "3"))
    assert "\n  python train.py '--epochs 3' ''\n" in shown(offered("--epochs 3", ""))


def test_nothing_that_the_hub_sends_commands_the_terminal() -> None:
    text = shown(offered("\x1b[2J\rpython harmless.py", entry="tr\u202eain.py"))
    assert "\n  python 'tr?ain.py' '?[2J?python harmless.py'\n" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_code_sources_are_shown_before_consent() -> None:
    assert "\nFiles and models may also come from https://store.example," in shown(
        offered(store="https://store.example")
    )
    assert "come from" not in shown(offered())
