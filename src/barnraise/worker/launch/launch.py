"""``barnraise.launch(fn, ...)``: run a function of a script or notebook on the cluster; rank 0 answers."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import AgentResponse, RequestDone, decode_response, encode
from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_options import MAX_TITLE, RunOptions, RunProgram, ScriptImports
from barnraise.agent_client.run_requests import (
    FollowPosition,
    ResultsRequest,
    ResultsResponse,
    RunRequest,
    RunRow,
    RunStarted,
    StartRunRequest,
    StopRunRequest,
    WatchRequest,
    WatchResponse,
)
from barnraise.artifacts import (
    RESULTS,
    ArtifactStore,
    FileEntry,
    FolderManifest,
    folder_limits,
    pack,
    read_files,
    store_directory,
)
from barnraise.artifacts.store.manifest import make_manifest
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import AgentError, BarnraiseError, ListenerError, RunEnvironmentError, RunError
from barnraise.core.files import write_atomically
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size, parse_duration
from barnraise.display.notebook.live import RunDisplay, require_notebook
from barnraise.environments.build_size import listed_packages
from barnraise.environments.script_imports import scan_imports
from barnraise.worker.launch.remote_main import ARGUMENTS, RESULT, SCRIPT, encode_call
from barnraise.worker.launch.script_builder import script_of
from barnraise.worker.launch.serializer import decode_values

R = TypeVar("R")
T = TypeVar("T", bound=AgentResponse)

_ANSWER_S = 20.0
_RESULTS_S = 600.0
_AWAY_S = 60.0  # how long this machine's agent may be silent before we give up


def launch(
    fn: Callable[..., R],
    /,
    *args: Any,
    on: str | Sequence[str] | None = None,
    per_node: int = 0,
    min_nodes: int = 1,
    wait: str | float = "30s",
    env: str = "auto",
    engine: str = "auto",
    restarts: int = 0,
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    show: bool | Literal["display"] = True,
    timeout: str | float | None = None,
    **kwargs: Any,
) -> R:
    """Call ``fn(*args, **kwargs)`` once on every device of the cluster; returns what it returned on rank 0.

    Arguments and result are plain data, numpy arrays and tensors. ``folder`` is sent as well. ``show`` prints
    rank 0's output; ``"display"`` shows the live picture of a notebook instead. At ``timeout`` the run is
    stopped. RunError if it fails, with the first failing worker's last output.
    """
    options: dict[str, object] = {"on": on, "per_node": per_node, "min_nodes": min_nodes, "wait": wait}
    options |= {"env": env, "engine": engine, "restarts": restarts, "folder": folder}
    options |= {"name": name, "show": show, "timeout": timeout}
    home = Path(folder).resolve() if folder is not None else None
    script = script_of(fn, home)
    _check_call(fn, args, kwargs, options)
    contents = encode_call(args, kwargs, script.constants)
    settings = load_settings()
    store = ArtifactStore(store_directory(state_directory(settings)))
    with tempfile.TemporaryDirectory(prefix="barnraise-") as draft:
        (Path(draft) / SCRIPT).write_text(script.text, encoding="utf-8")
        write_atomically(Path(draft) / ARGUMENTS, contents)
        manifest = _pack(Path(draft), home, store, settings)
    question = StartRunRequest(
        program=RunProgram(
            command=(SCRIPT,),
            folder=store.put_manifest(manifest),
            needs=_needs(store, manifest),
            packages=listed_packages(store, manifest, env),  # type: ignore[arg-type]  # checked below
        ),
        options=RunOptions(
            title=name or fn.__name__[:MAX_TITLE],
            per_node=per_node,
            min_nodes=min_nodes,
            wait_s=_seconds(wait),
            restarts=restarts,
            environment=env,  # type: ignore[arg-type]  # checked below
            engine=engine,  # type: ignore[arg-type]
        ),
        on=(on,) if isinstance(on, str) else tuple(on or ()),
    )
    _check_question(question)
    if show == "display":
        require_notebook()
    view = _View(sys.stdout.write if show is True else None)
    agent = _Agent(settings, view.say)
    started = agent.ask(question, RunStarted, question.options.wait_s + _ANSWER_S)
    size, where = format_size(manifest.size), ", ".join(started.nodes)
    view.say(f"run {started.run} of {fn.__name__} ({size}) on {where}")
    deadline = None if timeout is None else time.monotonic() + _seconds(timeout)
    with RunDisplay(started.run) if show == "display" else nullcontext():
        row = _watch(agent, started.run, view, deadline)
    result_file = _bring(agent, store, row, (home or Path.cwd()) / RESULTS / row.run, view)
    result: R = _result(store, row, result_file)
    view.say(f"run {row.run}: {row.sentence}")
    return result


# before it starts


def _check_call(
    fn: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Mapping[str, object],
) -> None:
    """Raise at once for a call that would fail on every worker, or that is ambiguous."""
    title, signature = fn.__name__, inspect.signature(fn)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise RunError(
            f"{title} cannot be called so: {error}", hint=f"It takes {title}{signature}; give these."
        ) from error
    if options["show"] not in (True, False, "display"):
        raise RunError(f"show={options['show']!r} is not possible", hint='Give True, False or "display".')
    defaults = inspect.signature(launch).parameters
    for option, value in options.items():
        is_meant = value is not defaults[option].default and value != defaults[option].default
        if is_meant and option in signature.parameters and option not in given:
            raise RunError(
                f"launch and {title} both have an argument called {option}",
                hint=f"Pass {title}'s by position, or rename it; {option}= is launch's own.",
            )


def _pack(draft: Path, folder: Path | None, store: ArtifactStore, settings: Settings) -> FolderManifest:
    """Pack the script and its arguments, and the folder's files if there is one."""
    limits = folder_limits(settings)
    manifest = pack(draft, store, limits, everything=True).manifest
    if folder is None:
        return manifest
    own = {entry.path for entry in manifest.files}
    files = [entry for entry in pack(folder, store, limits).manifest.files if entry.path not in own]
    both = make_manifest([*manifest.files, *files])
    if both.size > limits.most_bytes:
        raise RunError(
            f"the folder and the arguments have {format_size(both.size)} together, at most "
            f"{format_size(limits.most_bytes)} are allowed",
            hint="List what the run does not need in .barnraiseignore, or raise BARNRAISE_RUNS_MOST_BYTES.",
        )
    return both


def _needs(store: ArtifactStore, manifest: FolderManifest) -> ScriptImports:
    needs = scan_imports(read_files(store, manifest, lambda path: path.endswith(".py")), SCRIPT)
    if needs.syntax is not None:
        raise RunEnvironmentError(needs.syntax, hint="Correct the file; nothing was sent or started.")
    return needs


def _check_question(question: StartRunRequest) -> None:
    try:
        msgspec.msgpack.decode(encode(question), type=StartRunRequest)
    except msgspec.ValidationError as error:
        raise RunError(
            f"an option of launch has a value that is not possible: {error}",
            hint="See docs/notebook.md for what each option takes.",
        ) from error


def _seconds(value: str | float) -> float:
    return parse_duration(value) if isinstance(value, str) else float(value)


# while it runs


@dataclass(frozen=True)
class _Agent:
    """Connection to the agent of this machine."""

    settings: Settings
    say: Callable[[str], None]

    def ask(self, question: RunRequest, expected: type[T], timeout_s: float = _ANSWER_S) -> T:
        try:
            client = ListenerClient.connect(state_directory(self.settings))
        except ListenerError as error:
            raise AgentError(
                "no agent runs on this machine", hint="Start it: barnraise up --detach"
            ) from error
        with client:
            answer = decode_response(client.ask(encode(question), timeout_s))
        if not isinstance(answer, expected):
            raise AgentError(f"the agent answered {type(answer).__name__} to a {type(question).__name__}")
        return answer

    def patiently(self, question: RunRequest, expected: type[T]) -> T:
        """Ask again while the agent restarts: its runs outlive a short silence."""
        give_up = time.monotonic() + _AWAY_S
        while True:
            try:
                return self.ask(question, expected)
            except AgentError as error:
                if time.monotonic() > give_up:
                    raise
                self.say(f"this machine's agent does not answer, waiting for it: {error.message}")
                time.sleep(0.5)


@dataclass
class _View:
    """Shows rank 0's output and each change once; also keeps the place in that output."""

    write: Callable[[str], object] | None
    version: int = 0
    following: LogTail = field(default_factory=LogTail)
    shown: set[str] = field(default_factory=set)

    def say(self, text: str) -> None:
        if self.write is not None and text not in self.shown:
            self.shown.add(text)
            sys.stderr.write(f"barnraise: {printable(text)}\n")
            sys.stderr.flush()

    def follow(self, response: WatchResponse | None) -> tuple[FollowPosition, ...]:
        return () if response is None else self.following.wanted(dict.fromkeys(_main_worker(response), 0))

    def show(self, response: WatchResponse) -> None:
        row = response.row
        for line in (*response.findings, *response.notes):
            self.say(line)
        for name, why in row.left_out:
            self.say(f"{name} takes no part: {why}")
        for part in response.parts if row.phase == "preparing" else ():
            if part.stage == "asks":
                self.say(f"waiting for {part.name}, a guest: its user must run `barnraise accept {row.run}`")
            elif part.stage == "building":
                self.say(f"{part.name}: {part.words or part.stage}")
        for _, line in self.following.heard(response):
            self._print(line)
        if row.version != self.version and row.phase not in ("preparing", "ended"):
            self.say(row.sentence)
        self.version = row.version

    def is_done(self, response: WatchResponse) -> bool:
        return response.row.phase == "ended" and self.following.is_complete(_main_worker(response))

    def _print(self, line: str) -> None:
        if self.write is not None:
            self.write(f"{line}\n")
            sys.stdout.flush()


def _main_worker(response: WatchResponse) -> list[int]:
    return [worker.number for worker in response.workers if worker.rank == 0]


def _watch(agent: _Agent, run: str, view: _View, deadline: float | None) -> RunRow:
    """Watch until the run stops. If the caller leaves early, stop the run: its result would be lost."""
    response: WatchResponse | None = None
    try:
        while response is None or not view.is_done(response):
            question = WatchRequest(run=run, version=view.version, follow=view.follow(response), wait_s=1.0)
            response = agent.patiently(question, WatchResponse)
            view.show(response)
            if deadline is not None and time.monotonic() > deadline and response.row.phase != "ended":
                raise RunError(
                    f"run {run} did not end in the time it was given, and was stopped: "
                    f"{response.row.sentence}",
                    hint=f"Give it a longer timeout; its output so far: barnraise logs {run}",
                )
    except BaseException:
        view.say(f"stopping run {run}")
        with suppress(BarnraiseError):
            agent.ask(StopRunRequest(run), RequestDone)
        raise
    return response.row


# after it has ended


def _bring(agent: _Agent, store: ArtifactStore, row: RunRow, target: Path, view: _View) -> FileEntry | None:
    """Rank 0's result in the store; the other files that it wrote go into ``target``."""
    try:
        response = agent.ask(ResultsRequest(row.run), ResultsResponse, _RESULTS_S)
        manifest = store.manifest(response.manifest) if response.manifest else None
        if response.sentence:
            view.say(response.sentence)
        if manifest is None:
            return None
        others = [entry for entry in manifest.files if entry.path != RESULT]
        if others:
            store.unpack(make_manifest(others), target)
            view.say(f"{len(others)} files that rank 0 wrote are in {target}")
        return next((entry for entry in manifest.files if entry.path == RESULT), None)
    except BarnraiseError as error:
        if row.code == 0:
            raise
        view.say(error.message)  # why it failed matters more
        return None


def _result(store: ArtifactStore, row: RunRow, result_file: FileEntry | None) -> Any:
    if row.code != 0:
        worker = f"rank {row.failed_rank} on {row.failed_on}" if row.failed_on else "the first failure"
        words = f"\n--- last output of {worker}\n{row.tail.rstrip()}\n---" if row.tail else ""
        raise RunError(
            f"run {row.run}: {row.sentence}{words}",
            hint=f"Full output of every machine: barnraise logs {row.run} --all",
        )
    if result_file is None:
        raise RunError(
            f"run {row.run} ended without a result of rank 0",
            hint=f"A function must return, not exit; see its output: barnraise logs {row.run}",
        )
    with tempfile.TemporaryDirectory(prefix="barnraise-") as draft:
        store.unpack(make_manifest([result_file]), Path(draft) / "result")
        (value,) = decode_values((Path(draft) / "result" / RESULT).read_bytes())
    return value
