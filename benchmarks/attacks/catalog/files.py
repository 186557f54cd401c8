"""Attacks by an owner's machine on others: specs in another's name, false files, false checkpoints."""

from __future__ import annotations

import os
from typing import Any, Final

from barnraise.artifacts import ArtifactStore, store_directory
from barnraise.runs.record import read_spec
from benchmarks.attacks.catalog.runs import encoded_record
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import MAX_GROWTH
from benchmarks.attacks.scenes.runs import OWNERS, RunCluster

_OWNER: Final = "owner"
_LISTS = {
    "above": "does not stay below the folder",
    "far above": "does not stay below the folder",
    "absolute": "does not stay below the folder",
    "drive": "which Windows does not allow",
    "backslash": "which Windows does not allow",
    "stream": "which Windows does not allow",
    "device": "the name of a device on Windows",
    "case": "differ only in case",
    "form": "differ only in case or in the form of a letter",
    "under a file": "is a file and",
    "dot": "does not stay below the folder",
    "empty": "does not stay below the folder",
    "not in order": "its paths are not in order",
    "a terabyte": "it describes",
    "many files": "files",
}


_OFFERS = {
    "another run": "it belongs to run another-run",
    "another step": "it was changed after it was signed",
    "another state": "the fetched files are another checkpoint than the requested one",
    "a stranger's signature": "it was not signed by a machine of this cluster",
    "changed afterwards": "it was changed after it was signed",
    "a terabyte": "",
    "the run's own folder": "the fetched files are not a checkpoint",
}


@attack(
    "owner-signs-for-others",
    _OWNER,
    "sends specs in another's name or a guest's, and reuses a name",
    RunCluster,
)
def sign_for_others(cluster: RunCluster) -> str:
    record = cluster.record(cluster.run)
    with cluster.unchanged():
        result = cluster.attack(
            "owner_orders",
            keep=cluster.owner,
            agents=cluster.agents,
            record=encoded_record(cluster, cluster.run),
            guest=cluster.guest,
            canary=str(cluster.canary),
        )
        assert result["cut"] == dict.fromkeys(result["cut"], 2), "a message did not close its link"
        assert cluster.record(cluster.run) == record, "the record was changed"
        assert "mallory" not in (*cluster.runs(0), *cluster.runs(1), *cluster.runs(2)), "there is a new run"
    return "each cut the link"


def _ship(cluster: RunCluster, kind: str, seconds: float = 80.0) -> dict[str, Any]:
    run = f"mallory-{kind.replace(' ', '-')}-{os.urandom(2).hex()}"
    result = cluster.attack(
        "owner_ships",
        keep=cluster.owner,
        agents=cluster.agents,
        run=run,
        kind=kind,
        canary=str(cluster.canary),
        seconds=seconds,
    )
    for place in OWNERS:
        unpacked = cluster.machines.state(place) / "runs" / run / "folder"
        assert not unpacked.exists(), "something was unpacked"
    return {**result, "run": run}


def _ship_list(cluster: RunCluster, kind: str) -> str:
    with cluster.unchanged(growth=8 * MAX_GROWTH):
        result = _ship(cluster, kind)
        assert result["phase"] == "ended", result
        assert _LISTS[kind] in result["sentence"], result
    return f"the run ended: {_LISTS[kind]}"


def _register_lists() -> None:
    quick = ("above", "absolute", "backslash", "case", "a terabyte")
    for kind in _LISTS:
        attack(
            f"owner-ships-{kind.replace(' ', '-')}",
            _OWNER,
            f"ships a list of files of the kind {kind!r}",
            RunCluster,
            "quick" if kind in quick else "full",
        )(lambda cluster, kind=kind: _ship_list(cluster, kind))  # type: ignore[misc]


_register_lists()


@attack("owner-ships-a-million-files", _OWNER, "ships a list of a million files", RunCluster)
def ship_oversized_list(cluster: RunCluster) -> str:
    # The list does not arrive; the run waits for it, and a user may stop the run.
    with cluster.unchanged(growth=8 * MAX_GROWTH):
        result = _ship(cluster, "a million files", 5.0)
        assert result["phase"] == "preparing", result
        assert cluster.line.run(1, "stop", result["run"]).returncode == 0
        cluster.machines.until(lambda: cluster.phase(result["run"]) == "ended", 90.0, "it has ended")
    return "the list was not taken, and a person stopped the run"


@attack("owner-ships-wrong-bytes", _OWNER, "serves other bytes than the list names", RunCluster)
def ship_wrong_bytes(cluster: RunCluster) -> str:
    with cluster.unchanged():
        result = _ship(cluster, "wrong bytes")
        assert result["phase"] == "ended", result
        assert "trudy sent wrong bytes" in result["sentence"], result
        for place in OWNERS:
            store = ArtifactStore(store_directory(cluster.machines.state(place)))
            small = [path for path in store.objects.glob("??/*") if path.stat().st_size < 4096]
            contents = [path.read_bytes() for path in small]
            assert b"print('shipped')\n".swapcase() not in contents, "the wrong bytes were kept"
    return "not kept, and the run's last line names the sender"


@attack(
    "owner-offers-false-checkpoints",
    _OWNER,
    "offers copies of checkpoints that are not what they claim",
    RunCluster,
)
def offer_false_checkpoints(cluster: RunCluster) -> str:
    order = read_spec(cluster.record(cluster.run))
    for lie, words in _OFFERS.items():
        with cluster.unchanged():
            result = cluster.attack(
                "owner_offers",
                keep=cluster.owner,
                agents=cluster.agents,
                run=cluster.run,
                lie=lie,
                folder=order.program.folder.hex(),
                seconds=60.0,
            )
        assert len(result["words"]) == 2, (lie, result)
        assert all(words in text and text for text in result["words"]), (lie, result)
        for place in OWNERS:
            state = cluster.machines.state(place)
            kept = list((state / "runs" / cluster.run).glob("checkpoints/step-00000007"))
            assert not kept, f"{lie}: the copy was kept"
            store = ArtifactStore(store_directory(state))
            folder = store.manifest(order.program.folder)
            assert folder is not None, f"{lie}: the run's list of files is gone"
            assert not store.missing(folder), f"{lie}: files of the run are gone"
    return f"{len(_OFFERS)} kinds, each rejected with a reason"
