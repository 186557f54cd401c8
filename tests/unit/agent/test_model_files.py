"""Models on three machines with real stores, and through a real agent up to the library that loads them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from barnraise.agent.model_files import RunModels, refuse_pickles
from barnraise.agent_client.run_options import DataSet, ModelVersion
from barnraise.artifacts import PIECE, FolderManifest
from barnraise.artifacts.models.huggingface_cache import ModelReference, find_snapshot, snapshot_files
from barnraise.artifacts.packing.pack import pack_files
from barnraise.artifacts.store.manifest import FileEntry
from barnraise.artifacts.transfer import swarm_scheduler
from barnraise.core.config import RunSettings, Settings
from barnraise.core.errors import RunError
from barnraise.sandbox.choice import find_sandbox
from tests.unit.agent.test_artifact_service import Cluster, Host, run
from tests.unit.artifacts.models.caches import LIMITS, MODEL, weights, write_cache
from tests.unit.cli.typed import Machine

FILES = {"config.json": b"{}", "1.safetensors": weights(1, 3.5), "2.safetensors": weights(2, 4.5)}


class Scene(Cluster):
    """Machine 0 has the model in its Hugging Face cache and starts a run on all."""

    def __init__(self, tmp_path: Path, count: int = 3) -> None:
        super().__init__(tmp_path, count)
        self.room = tmp_path
        commit = write_cache(self.cache(self.source), MODEL, FILES)
        _, folder = find_snapshot(self.cache(self.source), ModelReference(MODEL))
        self.packed = pack_files(folder, snapshot_files(folder), self.source.store, LIMITS)
        version = ModelVersion(MODEL, "main", commit)
        self.data = DataSet("base", self.packed.id, is_model=True, version=version)
        for host in self.hosts:
            host.artifacts.allow(self.packed.id, [*self.nodes, self.source.me])
        self.words: list[str] = []

    def cache(self, host: Host) -> Path:
        return self.room / f"cache-{self.hosts.index(host)}"

    def models(self, host: Host) -> RunModels:
        settings = Settings(runs=RunSettings(huggingface_cache=str(self.cache(host))))
        home = self.room / f"home-{self.hosts.index(host)}"
        return RunModels(settings, host.store, home, self.words.append)

    async def fetch_model(self, host: Host, *, asks: bool = False) -> FolderManifest:
        look = self.models(host).on_manifest(self.data, asks=asks)
        source = [self.source.me]
        return await host.artifacts.fetch(self.packed.id, source, self.nodes, LIMITS, on_manifest=look)

    def sent(self, source: Host, target: Host) -> int:
        return self.network.sent[source.me, target.me]


def test_machine_with_the_files_fetches_none_and_the_third_fetches_from_both(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path)
        starter, owner, newcomer = scene.hosts
        write_cache(scene.cache(owner), MODEL, FILES)
        await asyncio.gather(*(scene.fetch_model(host) for host in (owner, newcomer)))
        scene.check(scene.packed, tmp_path)
        assert scene.sent(starter, owner) + scene.sent(newcomer, owner) < 5_000, "only lists and requests"
        both = [scene.sent(host, newcomer) for host in (starter, owner)]
        assert min(both) > 2 * PIECE
        assert sum(both) < 1.02 * scene.packed.bytes
        assert any("comparing model base" in words for words in scene.words)
        await scene.close()

    run(test)


def test_pieces_are_awaited_from_a_machine_that_still_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._START_S", 0.05)
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._LOOK_S", 0.02)

    async def test() -> None:
        scene = Scene(tmp_path)
        starter, owner, newcomer = scene.hosts
        write_cache(scene.cache(owner), MODEL, FILES)
        go_on = threading.Event()
        real = scene.models(owner).on_manifest(scene.data, asks=False)

        def slow(manifest: FolderManifest, adopted: Callable[[], None]) -> None:
            assert go_on.wait(60)
            real(manifest, adopted)

        fetches = [
            owner.artifacts.fetch(scene.packed.id, [starter.me], scene.nodes, LIMITS, on_manifest=slow),
            scene.fetch_model(newcomer),
        ]
        asyncio.get_running_loop().call_later(1.0, go_on.set)
        await asyncio.gather(*fetches)
        scene.check(scene.packed, tmp_path)
        assert scene.sent(owner, newcomer) > 2 * PIECE, "it was not given up"
        await scene.close()

    run(test)


def test_interrupted_transfer_resumes_with_what_was_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_scheduler, "RETRY_S", 0.05)

    async def test() -> None:
        scene = Scene(tmp_path, 2)
        starter, newcomer = scene.hosts
        write_cache(scene.cache(newcomer), MODEL, {"c": FILES["config.json"]})
        fetch = asyncio.create_task(scene.fetch_model(newcomer))
        while scene.sent(starter, newcomer) < scene.packed.bytes // 2:
            await asyncio.sleep(0)
        scene.network.isolate(starter.me)
        while newcomer.artifacts._unwritten_bytes:  # what has arrived is written
            await asyncio.sleep(0.01)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        await newcomer.artifacts.close()
        again = Host(scene.network, newcomer.me, tmp_path)  # as after a power cut
        scene.hosts[1] = scene.receivers[0] = again
        again.artifacts.allow(scene.packed.id, [starter.me])
        scene.network.isolate(starter.me, up=True)
        scene.network.sent.clear()
        await scene.fetch_model(again)
        scene.check(scene.packed, tmp_path)
        assert 0 < scene.sent(starter, again) < 0.6 * scene.packed.bytes
        await scene.close()

    run(test)


def test_guest_takes_no_pickles_and_no_piece_of_them(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path, 2)
        starter, guest = scene.hosts
        write_cache(scene.cache(starter), "x/pickled", {"pytorch_model.bin": weights(3, 1.5)})
        _, folder = find_snapshot(scene.cache(starter), ModelReference("x/pickled"))
        scene.packed = pack_files(folder, snapshot_files(folder), starter.store, LIMITS)
        for host in scene.hosts:
            host.artifacts.allow(scene.packed.id, [starter.me, guest.me])
        with pytest.raises(RunError, match=r"model base has weights that are pickles.*pytorch_model\.bin"):
            await scene.fetch_model(guest, asks=True)
        assert scene.sent(starter, guest) < 5_000
        await scene.fetch_model(guest)  # an owner's machine takes them
        assert scene.sent(starter, guest) > PIECE
        await scene.close()

    run(test)


def test_many_pickles_are_counted() -> None:
    entries = tuple(FileEntry(f"{number}.pt", 0, False, ()) for number in range(9))
    with pytest.raises(RunError, match="and 5 more"):
        refuse_pickles("base", FolderManifest(entries))


def test_cache_of_a_run_is_made_once_needed_and_removed_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path, 1)
        models = scene.models(scene.source)
        assert await models.make_cache() == ""
        manifest = await scene.fetch_model(scene.source)
        tree = scene.source.store.link_data(manifest)
        models.add(DataSet("folder", scene.packed.id, is_model=True), manifest, tree)
        assert await models.make_cache() == ""
        models.add(scene.data, manifest, tree)
        cache = Path(await models.make_cache())
        assert find_snapshot(cache, ModelReference(MODEL))[0] == scene.data.version
        models.close()
        assert not cache.exists()
        with pytest.raises(RunError, match="has ended"):
            models._compared("base", 1, 2)
        await scene.close()

    run(test)


LOOKS = """
import json, os
import barnraise
from huggingface_hub import hf_hub_download, snapshot_download
folder = barnraise.model_path("base")
facts = {
    "names": sorted(os.listdir(folder)),
    "by_id": open(hf_hub_download("some-org/Some-Model.1B", "config.json")).read(),
    "all": sorted(os.listdir(snapshot_download("some-org/Some-Model.1B"))),
    "offline": os.environ["HF_HUB_OFFLINE"],
    "cache": os.environ["HF_HUB_CACHE"],
}
print("FACTS", json.dumps(facts))
"""
LOADS = """
import json
import barnraise
from transformers import AutoConfig, AutoModelForCausalLM
models = [
    AutoModelForCausalLM.from_pretrained(place)
    for place in ("some-org/Some-Model.1B", barnraise.model_path("base"))
]
sums = [sum(float(p.double().sum()) for p in model.parameters()) for model in models]
hidden = AutoConfig.from_pretrained("some-org/Some-Model.1B").hidden_size
print("FACTS", json.dumps({"sums": sums, "hidden": hidden}))
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with a Hugging Face cache, where an agent runs."""
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        home = Path(room) / "hf"
        machine = Machine(Path(room), "oak", HF_HOME=str(home), BARNRAISE_DISCOVERY_METHODS="")
        with machine.typing("up") as agent:
            agent.until(lambda: _answers(machine), "the agent answers")
            yield machine


def _answers(machine: Machine) -> bool:
    try:
        machine.type("status")
    except AssertionError:  # it has not begun
        return False
    return True


def _facts(machine: Machine, script: str, *words: str) -> dict[str, object]:
    project = machine.room / "project"
    project.mkdir()
    (project / "train.py").write_text(script)
    output = machine.type(
        "run", "--on", machine.name, "--separate", "--folder", str(project), *words, str(project / "train.py")
    )
    (line,) = [line for line in output.splitlines() if "FACTS " in line]
    facts: dict[str, object] = json.loads(line.partition("FACTS ")[2])
    return facts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
@pytest.mark.parametrize("words", [(), ("--sandbox",)], ids=["open", "sandbox"])
def test_script_of_a_run_finds_model_by_name_and_by_id_offline(
    words: tuple[str, ...], machine: Machine
) -> None:
    if words and not find_sandbox().is_possible:
        pytest.skip("no sandbox is possible here")
    machine.type("rename", "oak")
    cache = Path(machine.environment["HF_HOME"]) / "hub"
    write_cache(cache, MODEL, {**FILES, "pytorch_model.bin": b"pickle"})
    before = sorted(path.relative_to(cache) for path in cache.rglob("*"))
    facts = _facts(machine, LOOKS, *words, "--model", f"base={MODEL}")
    assert facts["names"] == facts["all"] == sorted(FILES), "safetensors make the pickle needless"
    assert facts["by_id"] == "{}"
    assert facts["offline"] == "1"
    assert Path(str(facts["cache"])).is_relative_to(machine.state)
    assert not Path(str(facts["cache"])).exists(), "the run has ended"
    assert sorted(path.relative_to(cache) for path in cache.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_from_pretrained_with_the_id_loads_the_sent_weights(machine: Machine, tmp_path: Path) -> None:
    machine.type("rename", "oak")
    made = tmp_path / "made"
    # In a process of its own: the library keeps what the environment said when it was imported.
    program = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64,\n"
        "    num_attention_heads=2, num_key_value_heads=2)\n"
        f"model = LlamaForCausalLM(config)\nmodel.save_pretrained({str(made)!r})\n"
        "print(sum(float(p.double().sum()) for p in model.parameters()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cache = Path(machine.environment["HF_HOME"]) / "hub"
    write_cache(cache, MODEL, {path.name: path.read_bytes() for path in made.iterdir()})
    facts = _facts(machine, LOADS, "--model", f"base={MODEL}")
    expected = float(done.stdout.split()[-1])
    assert facts["sums"] == pytest.approx([expected, expected])
    assert facts["hidden"] == 32
