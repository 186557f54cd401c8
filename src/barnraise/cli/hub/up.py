"""``barnraise hub`` and ``barnraise invite``: keep a run that friends train over the internet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click
import msgspec

from barnraise.artifacts import (
    RESULTS,
    ArtifactStore,
    FolderManifest,
    encode_manifest,
    folder_limits,
    pack,
    store_directory,
)
from barnraise.cli.child_process import LEFT, LOOK_S, ChildProcess, say, until_left
from barnraise.cli.doctor.network_checks import hub_reach
from barnraise.cli.hub.directories import (
    is_pinned,
    kept_hub,
    start_hub,
    top_folder,
    write_local_address,
    write_proxied,
)
from barnraise.cli.hub.join import (
    client_of,
    keep_results,
    open_workspace,
    require_hub_parts,
    start_script,
    take_credentials,
)
from barnraise.cli.machine.identity import machine_key
from barnraise.cli.terminal import read_secret
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import BarnraiseError, HubError, RunError
from barnraise.core.flow.background import start_in_thread
from barnraise.core.units import counted, format_size, parse_duration
from barnraise.hub.storage.addresses import known_addresses, write_addresses
from barnraise.transport.addresses import own_addresses, show_address

if TYPE_CHECKING:
    from barnraise.cli.hub.join import JoinedHub
    from barnraise.hub.protocol.invites import Invite
    from barnraise.hub.protocol.messages import Role, RoundConfig, RunDescription

T = TypeVar("T")

_ANSWER_S = 60.0
_CHECK_S = 150.0  # the owner's check reads its samples first
_OWNERS_S = 3600.0
_POLL_S = 20.0


class HubUpOptions(NamedTuple):
    name: str
    host: str
    port: int
    plain: bool
    proxied: bool
    address: tuple[str, ...]
    uses: int
    round_time: str | None
    codec: str | None
    wait_for: int | None
    quorum: float | None
    max_staleness: int | None
    linear_scaling: bool
    rounds: int | None
    train: bool
    parent: str
    seats: int
    held_out: Path | None
    store: str
    store_endpoint: str
    folder: Path | None
    script: str | None
    arguments: tuple[str, ...]


def up(options: HubUpOptions) -> int:
    require_hub_parts()
    from barnraise.hub.object_store.s3 import parse_bucket_url
    from barnraise.hub.protocol.invites import check_addresses
    from barnraise.hub.storage.create import hub_key

    _check_fixed(options)
    if options.store or options.store_endpoint:
        parse_bucket_url(options.store, options.store_endpoint)  # before anything is made
    if options.held_out is not None and options.parent:
        raise HubError(
            "a region's updates are tried by the hub above it", hint="Give --held-out there, and not here."
        )
    sent = (options.folder or Path.cwd()).resolve()
    if options.held_out is not None and options.script and options.held_out.resolve().is_relative_to(sent):
        raise HubError(
            f"{options.held_out} is in the folder that every friend gets, {sent}",
            hint="Keep it and its samples in another folder: a member with the samples can train on them.",
        )
    options = options._replace(parent=read_secret(options.parent, "Invite"))
    check_addresses(options.address)
    settings = load_settings()
    directory = _directory(options, settings)
    hub_key(directory)
    addresses = options.address or known_addresses(directory) or _own(options)
    check_addresses(addresses)
    write_addresses(directory, addresses)
    write_proxied(directory, proxied=options.plain or options.proxied)
    with open_workspace(settings, directory.name) as place:
        return until_left(_keep_hub(options, directory, addresses, place, settings))


async def _keep_hub(
    options: HubUpOptions, directory: Path, addresses: Sequence[str], place: Path, settings: Settings
) -> int:
    from barnraise.hub.private_options import PrivateOptions
    from barnraise.hub.storage.create import create_invite

    host = options.host or ("127.0.0.1" if options.plain else "0.0.0.0")
    arguments = ["--host", host, "--port", str(options.port)]
    arguments += ["--plain"] if options.plain else []
    private: PrivateOptions | None = None
    if options.parent:
        arguments += ["--seats", str(options.seats)]
        private = PrivateOptions(parent=options.parent, offer=tuple(addresses), pinned=is_pinned(directory))
    if options.held_out is not None:
        arguments += ["--held-out", str(options.held_out.resolve())]
    if options.store:
        arguments += ["--store", options.store, "--store-endpoint", options.store_endpoint]
    hub = await start_hub(directory, arguments, place, private)
    owner: ChildProcess | None = None
    ending: asyncio.Future[None] | None = None
    try:
        local = _url(_loopback(host), options.port, plain=options.plain)
        write_local_address(directory, local)
        await _while_up(start_in_thread(partial(_await_founding, directory)), hub)
        # A region's model is its parent's; its own machine is a member like all others.
        role: Role = "friend" if options.parent else "owner"
        own = create_invite(directory, [local], role=role, valid_s=_OWNERS_S)
        contributor = await _while_up(
            start_in_thread(partial(_begin_own, own, place, options, settings)), hub
        )
        owner = await start_script(contributor) if contributor is not None else None
        described = await _while_up(start_in_thread(partial(_await_base, own, settings)), hub, owner)
        invite = create_invite(directory, addresses, uses=options.uses, pinned=is_pinned(directory))
        _print_invite(invite, addresses, options)
        if described.terms.rounds and not options.parent:
            target = (options.folder or Path.cwd()) / RESULTS / directory.name
            ending = start_in_thread(partial(_save_at_end, own, directory, target, settings))
        return await _watch(hub, owner, options, contributor, settings)
    except asyncio.CancelledError:
        say("the hub stops; `barnraise hub up` continues it, `barnraise hub export` writes its model")
        return LEFT
    finally:
        if ending is not None:
            ending.cancel()
        if owner is not None:
            await owner.stop()
        await hub.stop()


def _await_founding(directory: Path) -> None:
    """Wait until a region has learned of its parent's run and created its own."""
    from barnraise.hub.storage.create import has_founding
    from barnraise.hub.storage.log import HubLog

    give_up = time.monotonic() + _ANSWER_S
    while True:
        log = HubLog(directory)
        try:
            if has_founding(log):
                return
        finally:
            log.close()
        if time.monotonic() > give_up:
            raise HubError("the hub above does not answer", hint="See that it runs, then try again.")
        time.sleep(LOOK_S)


async def _while_up(work: asyncio.Future[T], hub: ChildProcess, owner: ChildProcess | None = None) -> T:
    """Return the result of the work, or raise if a process that it needs stops first."""
    try:
        while not work.done():
            for kept in (hub, owner):
                if kept is None:
                    continue
                kept.show()
                if kept.ended is not None and (kept is hub or kept.code):
                    kept.show()
                    whose = "the hub's process" if kept is hub else "the script on this machine"
                    raise HubError(f"{whose} {kept.how()}", hint="Follow the last lines above.")
            await asyncio.sleep(LOOK_S)
        return work.result()
    finally:
        work.cancel()


def _await_base(invite: Invite, settings: Settings) -> RunDescription:
    """Return the run once it has a model, so that members that join later need not wait for it."""
    from barnraise.hub.protocol.messages import RunDescription

    client = client_of(settings, invite.place)
    waiting = client.backoff("this machine's script, whose model the run begins with")
    while True:
        described = client.ask_with_retries("GET", "/v1/run", RunDescription, patience_s=_ANSWER_S)
        if described.version is not None:
            client.close()
            return described
        waiting.pause("it is not there yet", 0.2)


def _save_at_end(invite: Invite, directory: Path, target: Path, settings: Settings) -> None:
    """Wait for the end of the run, and write its model. Print an error: the hub goes on."""
    try:
        with contextlib.closing(client_of(settings, invite.place)) as client:
            head = client.head(None)
            while not head.finished:
                head = client.head(head.version, _POLL_S)
        from barnraise.hub.storage.export import FILE_NAME, export_model  # torch, which takes a while

        number = export_model(directory, target)
    except BarnraiseError as error:
        say(f"the model of the last round is not saved: {error.message}. {error.hint}")
        return
    path = os.path.relpath(target / FILE_NAME)
    say(f"the run is over after {counted(number, 'round')}: its model is {path}. Ctrl-C stops the hub")


def _begin_own(invite: Invite, place: Path, options: HubUpOptions, settings: Settings) -> JoinedHub | None:
    """Join this machine as a member without asking; None if it does not train."""
    from barnraise.cli.hub.code import look
    from barnraise.hub.protocol.messages import RunDescription

    client = client_of(settings, invite.place)
    try:
        patience_s = _ANSWER_S if options.held_out is None else _CHECK_S
        description = client.ask_with_retries("GET", "/v1/run", RunDescription, patience_s=patience_s)
        if description.version is not None and not options.train:
            return None
        offered = look(client, description, place, settings)
        return take_credentials(client, invite, offered, place, settings, only_begins=not options.train)
    finally:
        client.close()


async def _watch(
    hub: ChildProcess,
    owner: ChildProcess | None,
    options: HubUpOptions,
    contributor: JoinedHub | None,
    settings: Settings,
) -> int:
    """Watch until the hub stops. The hub keeps running after this machine's own part, for slower members."""
    while hub.ended is None:
        hub.show()
        if owner is not None and contributor is not None:
            owner.show()
            if owner.ended is not None:
                await _end_own(owner, options, contributor, settings)
                owner = None
        await asyncio.sleep(LOOK_S)
    hub.show()
    say(f"the hub's process {hub.how()}")
    return 1


async def _end_own(
    owner: ChildProcess, options: HubUpOptions, contributor: JoinedHub, settings: Settings
) -> None:
    owner.show()
    if owner.code == 0 and not options.train:
        return
    if owner.code == 0:
        target = (options.folder or Path.cwd()) / RESULTS / contributor.workspace.name
        await asyncio.to_thread(keep_results, contributor, target, settings)
    say(f"this machine's own part {owner.how()}; the hub continues until Ctrl-C")


def _loopback(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _print_invite(invite: Invite, addresses: Sequence[str], options: HubUpOptions) -> None:
    from barnraise.hub.protocol.invites import invite_text

    click.echo(f"The run {invite.run} is at {', '.join(addresses)}. Friends join it with:")
    click.echo(f"\n  barnraise join --invite {invite_text(invite)}\n")
    click.echo(
        f"It is for {counted(options.uses, 'machine')} within 7 days; `barnraise invite` makes one for each "
        "other friend."
    )
    problem, fix = hub_reach(addresses)
    if problem and not options.parent:  # a region is for the machines of one network
        say(f"{problem}. {fix}")


# where hubs are


def _directory(options: HubUpOptions, settings: Settings) -> Path:
    if options.parent and options.script:
        raise HubError(
            "a region trains what its parent trains",
            hint="Leave out the script: barnraise hub up --parent INVITE",
        )
    if options.parent:
        from barnraise.hub.protocol.invites import read_invite

        return top_folder(settings) / (options.name or f"{read_invite(options.parent).run}-region")
    return _new(options, settings) if options.script else kept_hub(options.name, settings)


def _new(options: HubUpOptions, settings: Settings) -> Path:
    """Create the hub: store the folder's files as blobs, and make this machine's key the owner."""
    from barnraise.hub.client.credentials import member_key
    from barnraise.hub.protocol.messages import CodeDescription, RoundConfig, encode_message
    from barnraise.hub.storage.create import create_hub, hub_blobs, hub_key

    assert options.script is not None
    folder = (options.folder or Path.cwd()).resolve()
    path = Path(options.script)
    if not path.is_file() or not path.resolve().is_relative_to(folder):
        raise RunError(
            f"there is no script {options.script} in the folder that is sent, {folder}",
            hint="Run it from the script's own folder, or name the folder with --folder.",
        )
    terms = _round_terms(options)
    if terms.codec != RoundConfig().codec:
        from barnraise.hub.protocol.vector_file import check_codec  # torch, which takes a while

        check_codec(terms.codec)
    name = options.name or path.stem
    directory = top_folder(settings) / name
    if (directory / "hub.db").exists():
        raise HubError(
            f"there is a hub called {name} on this machine already",
            hint=f"Continue it: barnraise hub up --name {name}; or choose another name with --name.",
        )
    store = ArtifactStore(store_directory(state_directory(settings)))
    packed = pack(folder, store, folder_limits(settings))
    say(f"{counted(packed.files, 'file')} of {folder.name}, {format_size(packed.bytes)}, go to every friend")
    blobs = hub_blobs(directory)
    contents = _contents(packed.manifest, store, directory)
    manifest = blobs.put(encode_manifest(packed.manifest))
    entry = path.resolve().relative_to(folder).as_posix()
    code = CodeDescription(entry=entry, arguments=options.arguments, manifest=manifest, contents=contents)
    create_hub(
        directory,
        name,
        member_key(machine_key(settings), hub_key(directory).id).id,
        terms,
        code=blobs.put(encode_message(code)),
        kept=(manifest, *contents),
    )
    return directory


def _check_fixed(options: HubUpOptions) -> None:
    """Raise HubError if an option of a new hub is given to a hub that exists, or to a region."""
    if options.script and not options.parent:
        return
    values = {
        "--round": options.round_time,
        "--codec": options.codec,
        "--wait-for": options.wait_for,
        "--quorum": options.quorum,
        "--max-staleness": options.max_staleness,
        "--linear-scaling": options.linear_scaling or None,
        "--rounds": options.rounds,
    }
    given = [name for name, value in values.items() if value is not None]
    if not given:
        return
    if options.parent:
        raise HubError("a region's rounds are those of its parent", hint=f"Leave out {', '.join(given)}.")
    raise HubError(
        "the rounds of a hub are fixed when it is created",
        hint=f"Leave out {', '.join(given)}, or start another hub: give its script and --name.",
    )


def _round_terms(options: HubUpOptions) -> RoundConfig:
    """Return the configuration of a new hub's rounds: the options that were given, and the defaults."""
    from barnraise.hub.protocol.messages import RoundConfig

    given: dict[str, object] = {
        "codec": options.codec,
        "round_s": None if options.round_time is None else parse_duration(options.round_time),
        "wait_for": options.wait_for,
        "quorum": options.quorum,
        "stale_limit": options.max_staleness,
        "linear_scaling": options.linear_scaling,
        "rounds": options.rounds,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(RoundConfig(), **changes)


def _contents(manifest: FolderManifest, store: ArtifactStore, directory: Path) -> tuple[str, ...]:
    from barnraise.hub.storage.create import hub_blobs

    blobs, blob_names = hub_blobs(directory), []
    for name in manifest.objects():
        with blobs.partial() as draft, store.object_path(name).open("rb") as file:
            while part := file.read(1 << 20):
                draft.write(part)
            blob_names.append(blobs.commit(draft))
    return tuple(blob_names)


def _own(options: HubUpOptions) -> tuple[str, ...]:
    addresses = [] if options.plain else [address for address in own_addresses() if ":" not in address][:4]
    return tuple(_url(address, options.port, plain=options.plain) for address in (addresses or ["127.0.0.1"]))


def _url(host: str, port: int, *, plain: bool) -> str:
    return f"{'http' if plain else 'https'}://{show_address(host, port)}"
