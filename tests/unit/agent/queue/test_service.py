"""Files that a queue fetches before a job starts, and runs that must stay known for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from barnraise.agent.queue.service import QueueService
from barnraise.agent_client.run_options import RunProgram
from barnraise.core.config import RunSettings, Settings
from barnraise.runs.queue.job import JobAttempt, KnownJob
from barnraise.runs.queue.spec import attempt_run
from tests.unit.agent.queue.test_registry import FakeContext
from tests.unit.agent.test_artifact_service import LIMITS, Host, run
from tests.unit.agent.test_model_files import FILES, Scene
from tests.unit.artifacts.models.caches import MODEL, write_cache
from tests.unit.runs.queue.test_job import job


def service_on(host: Host, cache: Path, directory: Path, *jobs: KnownJob) -> QueueService:
    """Return the queue of a machine with this Hugging Face cache."""
    context: Any = FakeContext()
    context.owners = tuple(host.network.hosts)
    context.settings = Settings(runs=RunSettings(huggingface_cache=str(cache)))
    context.directory = directory
    runs: Any = SimpleNamespace(
        registry=SimpleNamespace(), store=host.store, artifacts=host.artifacts, allow_files=lambda _: None
    )
    queue = QueueService(context, runs)
    queue.registry.jobs = {known.number: known for known in jobs}
    return queue


def test_model_of_a_job_is_taken_from_the_cache_of_its_machine(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path, 2)
        starter, owner = scene.hosts
        cache = scene.cache(owner)
        write_cache(cache, MODEL, FILES)
        waiting = job(1)
        program = RunProgram(command=("train.py",), folder=bytes(32), data=(scene.data,))
        known = replace(waiting, spec=replace(waiting.spec, program=program))
        queue = service_on(owner, cache, tmp_path / "state", known)
        await queue._fetch_missing(scene.packed.id, [starter.me], LIMITS)
        scene.check(scene.packed, tmp_path)
        assert scene.sent(starter, owner) < 5_000, "only lists and requests"
        await scene.close()

    run(test)


def test_runs_are_awaited_until_their_job_has_ended_with_its_files(tmp_path: Path) -> None:
    def known(number: int, state: Any, *, is_collected: bool = False) -> KnownJob:
        attempts = tuple(JobAttempt(number=place, nodes=(bytes(32),)) for place in (1, 2))
        record = replace(job(number).record, state=state, attempts=attempts, is_collected=is_collected)
        return replace(job(number), record=record)

    async def test() -> None:
        scene = Scene(tmp_path, 1)
        jobs = (
            known(1, "running"),
            known(2, "done"),
            known(3, "done", is_collected=True),
            known(4, "failed"),
        )
        queue = service_on(scene.source, tmp_path, tmp_path, *jobs)
        assert queue.awaited_runs() == {attempt_run(each.spec, 2) for each in jobs[:2]}
        assert queue._runs.awaited_by_jobs() == queue.awaited_runs()
        await scene.close()

    run(test)
