"""Text that a person sees before code of a hub runs here: all of it comes from the hub."""

from __future__ import annotations

from pathlib import Path

from barnraise.artifacts import FolderManifest
from barnraise.cli.consent import ClusterReach, describe
from barnraise.cli.hub.code import OfferedCode, cluster_reach, offered_run
from barnraise.cli.machine.identity import machine_key
from barnraise.core.config import Settings, StateSettings
from barnraise.hub.protocol.messages import CodeDescription, RoundConfig, RunDescription
from barnraise.identity.keys import NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.storage import MembershipStorage
from barnraise.membership.view import first


def offered(*arguments: str, entry: str = "train.py", store: str | None = None) -> OfferedCode:
    node = str(NodeKey.generate().id)
    description = RunDescription(
        protocol=1, hub=node, name="fireside", owner=node, terms=RoundConfig(), store=store
    )
    code = CodeDescription(entry=entry, arguments=arguments, manifest="0" * 64, contents=())
    return OfferedCode(description, code, FolderManifest(()))


def shown(code: OfferedCode) -> str:
    return describe(offered_run(code, ClusterReach()))


def test_one_argument_cannot_look_like_two() -> None:
    assert " python train.py --epochs 3\n" in shown(offered("--epochs", "3"))
    assert " python train.py '--epochs 3' ''\n" in shown(offered("--epochs 3", ""))


def test_nothing_that_the_hub_sends_commands_the_terminal() -> None:
    text = shown(offered("\x1b[2J\rpython harmless.py", entry="tr\u202eain.py"))
    assert " python 'tr?ain.py' '?[2J?python harmless.py'\n" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_code_sources_are_shown_before_consent() -> None:
    assert " Files and models may also come from https://store.example," in shown(
        offered(store="https://store.example")
    )
    assert "come from" not in shown(offered())


def test_cluster_of_this_machine_is_named_before_consent(tmp_path: Path) -> None:
    """A script that a friend accepts on an owner's machine reaches every machine of that cluster."""
    settings = Settings(state=StateSettings(directory=str(tmp_path)))
    assert cluster_reach(settings) == ClusterReach(), "no cluster yet"
    key, other, guest = machine_key(settings), NodeKey.generate(), NodeKey.generate()
    log = TrustLog.found(key, "mac")
    log = log.extended(log.admit(key, other.id, "owner", "nas"))
    log = log.extended(log.admit(key, guest.id, "guest", "friend"))
    storage = MembershipStorage(tmp_path)
    record = founded(first(key.id.raw, bytes(16), len(log)))
    storage.replace_cluster(record, tuple(map(encode_entry, log.entries)))
    try:
        reach = cluster_reach(settings)
    finally:
        storage.close()
    assert reach == ClusterReach("owner", [f"nas ({other.id.short})", f"friend ({guest.id.short})"])
    question = " ".join(describe(offered_run(offered(), reach)).split())
    assert f"this machine is an owner of a cluster with nas ({other.id.short})" in question
