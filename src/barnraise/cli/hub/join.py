"""``barnraise join --invite``: train a friend's model on this machine for as long as you like, then leave.

Everything lies in one folder of this machine's state directory while it lasts. When this command ends,
however it ends, so does everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from barnraise.agent.daemon import machine_name
from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse
from barnraise.artifacts import ArtifactStore, FolderManifest, changed_since, folder_limits, pack, unpack_into
from barnraise.cli.agent_call import ask
from barnraise.cli.child_process import LEFT, ChildProcess, say, until_left
from barnraise.cli.consent import agrees
from barnraise.cli.hub.directories import is_in_use, workspace_root, workspaces_with
from barnraise.cli.machine.identity import machine_key
from barnraise.cli.terminal import read_secret
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import HubError
from barnraise.core.files import remove_tree
from barnraise.core.installation import install_hint
from barnraise.core.logs.audit_entry import AuditEvent
from barnraise.core.logs.audit_log import AuditLog
from barnraise.core.units import counted

if TYPE_CHECKING:
    from barnraise.cli.hub.code import OfferedCode
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.client.credentials import MemberCredentials
    from barnraise.hub.protocol.invites import HubPlace, Invite
    from barnraise.hub.protocol.messages import JoinRequest, JoinResponse
    from barnraise.identity.keys import NodeKey
    from barnraise.sandbox.spec import SandboxCommand

_PATIENCE_S = 30.0
_MOVED = -1  # instead of an exit code: the region is gone, and the script starts again elsewhere
CREDENTIALS_FILE = "credentials"  # in the workspace of a command that trains
CONTRIBUTING_VARIABLES = "BARNRAISE_CONTRIBUTING_"  # prefix of settings that are about a hub
_PASSED_ON = (CONTRIBUTING_VARIABLES, "BARNRAISE_CONFIG", "BARNRAISE_DEVICE")  # what the person chose here


class JoinedHub(NamedTuple):
    """A machine that may begin: its files are laid out, and it has credentials."""

    workspace: Path
    folder: Path
    command: tuple[str, ...]
    manifest: FolderManifest
    credentials: MemberCredentials


def run(
    *, invite: str, yes: bool, name: str, keep: Path | None, quiet: bool, site: bool, is_sandboxed: bool
) -> int:
    require_hub_parts()
    from barnraise.cli.hub.code import cluster_reach, look, offered_run
    from barnraise.hub.protocol.invites import read_invite
    from barnraise.hub.protocol.messages import RunDescription

    parsed_invite = read_invite(read_secret(invite, "Invite"))
    if parsed_invite.role == "mirror":
        raise HubError(
            "this invite is for a mirror, which does not train", hint="Use `barnraise hub follow`."
        )
    settings = load_settings()
    machines = _machines_of_site() if site else ()
    client = client_of(settings, parsed_invite.place)
    with open_workspace(settings, parsed_invite.run) as place:
        # The invite signs these requests, so that strangers cannot keep this machine out.
        with contextlib.closing(
            client_of(settings, parsed_invite.place, key=parsed_invite.signer)
        ) as visitor:
            description = visitor.ask_with_retries("GET", "/v1/run", RunDescription, patience_s=_PATIENCE_S)
            offered = look(visitor, description, place, settings)
        question = "Run it there?" if site else "Run it here?"
        # The machines of a site have no sandbox: the broker of a run does not reach a hub.
        is_sandboxed, sentence = (False, "") if site else _decide_sandbox(is_wanted=is_sandboxed, yes=yes)
        shown_run = replace(offered_run(offered, cluster_reach(settings), machines), sandbox=sentence)
        if not agrees(shown_run, question, yes=yes):
            click.echo("Nothing was started, and nothing is kept.")
            _record_consent(settings, "consent-refused", offered)
            return 1
        _record_consent(settings, "consent-given", offered)
        client.accept_store(description.store)
        contributor = take_credentials(client, parsed_invite, offered, place, settings, name=name)
        if site:
            from barnraise.cli.hub.site import (
                train_site,
            )  # which takes a while to load, and one machine needs not

            client.close()
            return train_site(contributor, settings, keep=keep, quiet=quiet)
        client.close()
        say("training; Ctrl-C leaves immediately and deletes its files")
        top = parsed_invite.place
        while True:
            work = _train(contributor, top, settings, quiet=quiet, is_sandboxed=is_sandboxed)
            if (code := until_left(work)) != _MOVED:
                break
            contributor = _move(contributor, parsed_invite, description.store, settings, name)
        if code == 0 and keep is not None:
            keep_results(contributor, keep, settings)
    if code == LEFT:
        say("this machine has left; nothing of the run is kept here")
    return code


def _decide_sandbox(*, is_wanted: bool, yes: bool) -> tuple[bool, str]:
    """Return whether a sandbox confines the script, and a statement about it for the person.

    ``yes``: there is no question. Then RunEnvironmentError is raised if no sandbox is possible.
    """
    from barnraise.sandbox.choice import find_sandbox, no_sandbox, sandbox_sentence

    sandbox = find_sandbox()
    if is_wanted and yes and not sandbox.is_possible:
        raise no_sandbox(sandbox)
    return is_wanted and sandbox.is_possible, sandbox_sentence(is_wanted=is_wanted)


def _record_consent(settings: Settings, event: AuditEvent, offered: OfferedCode) -> None:
    AuditLog(state_directory(settings)).write(
        event,
        subject=f"{offered.description.name} of the hub {offered.description.hub[:9]}",
        by="this machine's user",
        detail=shlex.join((offered.code.entry, *offered.code.arguments)),
        digest=offered.description.code or "",
    )


def _machines_of_site() -> tuple[str, ...]:
    """Return the machines that a run would start on: online, working, and of an owner."""
    response = ask(StatusRequest(), StatusResponse)
    machines = [
        node for node in response.nodes if node.seniority is not None and node.works and node.role == "owner"
    ]
    return tuple(f"{node.name} ({node.short})" for node in machines)


def require_hub_parts() -> None:
    """Raise HubError with the install command if the packages for hubs are missing."""
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError as error:
        raise HubError("what a hub needs is not installed here", hint=install_hint("hub")) from error


def client_of(
    settings: Settings, place: HubPlace, answer_s: float | None = None, *, key: NodeKey | None = None
) -> HubClient:
    """Create a client with the key that this machine has at the hub, or with another one."""
    from barnraise.hub.client.client import ANSWER_S, HubClient
    from barnraise.hub.client.credentials import member_key

    key = key or member_key(machine_key(settings), place.hub)
    return HubClient(
        place.addresses,
        place.hub,
        key,
        pinned=place.pinned,
        say=say,
        proxy_token=settings.hosting.proxy_token,
        led_from=place.led_from,
        root=place.root,
        answer_s=answer_s or ANSWER_S,
    )


def take_credentials(
    client: HubClient,
    invite: Invite,
    offered: OfferedCode,
    place: Path,
    settings: Settings,
    *,
    name: str = "",
    only_begins: bool = False,
) -> JoinedHub:
    """Join as a member, and fetch everything that the script's process needs."""
    from barnraise.cli.hub.code import lay_out

    _check_free(settings, invite)
    request, joined = _join(client, invite, settings, name, _PATIENCE_S)
    folder = lay_out(client, offered, place)
    seat = JoinedSeat(client, invite, request, joined)
    credentials = _settle(seat, place, settings, only_begins=only_begins)
    return JoinedHub(
        place, folder, (offered.code.entry, *offered.code.arguments), offered.manifest, credentials
    )


class JoinedSeat(NamedTuple):
    """A seat at the hub of an invite, which may be exchanged for one at a region."""

    client: HubClient
    invite: Invite
    request: JoinRequest
    joined: JoinResponse


def _join(
    client: HubClient, invite: Invite, settings: Settings, name: str, patience_s: float | None
) -> tuple[JoinRequest, JoinResponse]:
    from barnraise.hub.client.credentials import member_key
    from barnraise.hub.protocol.messages import JoinResponse

    own_id = member_key(machine_key(settings), invite.hub_id).id
    request = invite.request(own_id, fit_name(name or machine_name()))
    return request, client.ask_with_retries(
        "POST", "/v1/members", JoinResponse, request, patience_s=patience_s
    )


def _settle(
    seat: JoinedSeat, place: Path, settings: Settings, *, only_begins: bool = False
) -> MemberCredentials:
    """Take the seat at the hub or at the nearest of its regions, and write its credentials."""
    from barnraise.hub.client.credentials import (
        MemberCredentials,
        member_key,
        member_secret,
        write_credentials,
    )

    (client, invite, request, joined), key = seat, machine_key(settings)
    hub = invite.place
    if joined.regions:
        from barnraise.cli.hub.region import JoinedPlace, settle

        first = JoinedPlace(hub, request, joined, client.network)
        hub = settle(first, partial(client_of, settings), lambda region: member_key(key, region).id)
    credentials = MemberCredentials(
        addresses=hub.addresses,
        hub=hub.hub.raw,
        key=member_secret(key, hub.hub),
        run=invite.run,
        pinned=hub.pinned,
        led_from=hub.led_from,
        root=None if hub.root is None else hub.root.raw,
        folder=str(_made(place / "training")),
        store=client.store,
        proxy_token=client.proxy_token,
        is_owner=joined.role == "owner",
        only_begins=only_begins,
    )
    write_credentials(credentials, place / CREDENTIALS_FILE)
    say(f"this machine is {request.name} in {invite.run}")
    return credentials


def _move(
    contributor: JoinedHub, invite: Invite, store: str | None, settings: Settings, name: str
) -> JoinedHub:
    """Take a seat again, at another region or at the run's hub. Wait while the hub does not answer."""
    (contributor.workspace / CREDENTIALS_FILE).unlink(missing_ok=True)
    with contextlib.closing(client_of(settings, invite.place)) as client:
        client.accept_store(store)
        request, joined = _join(client, invite, settings, name, None)
        seat = JoinedSeat(client, invite, request, joined)
        return contributor._replace(credentials=_settle(seat, contributor.workspace, settings))


def _check_free(settings: Settings, invite: Invite) -> None:
    """Check that no other command trains for this hub: the hub would see one member twice."""
    from barnraise.hub.client.credentials import read_credentials

    for taken in workspaces_with(settings, CREDENTIALS_FILE):
        if read_credentials(taken / CREDENTIALS_FILE).hub_id == invite.hub_id:
            raise HubError(
                f"this machine trains in {invite.run} already",
                hint="End the other command first; a hub that is not to train itself: hub up --no-train.",
            )


async def start_script(
    contributor: JoinedHub, wrapped: SandboxCommand | None = None, *, quiet: bool = False
) -> ChildProcess:
    """Start the script of a hub: in a sandbox, if ``wrapped`` is its command there."""
    earlier = len(list(contributor.workspace.glob("script*.output")))  # before this machine changed its seat
    return await ChildProcess.start(
        f"script-{earlier}" if earlier else "script",
        (sys.executable, *contributor.command) if wrapped is None else wrapped.command,
        workspace=contributor.workspace,
        folder=contributor.folder,
        environment=_environment(contributor) if wrapped is None else wrapped.environment,
        quiet=quiet,
    )


async def _train(
    contributor: JoinedHub, top: HubPlace, settings: Settings, *, quiet: bool, is_sandboxed: bool
) -> int:
    with contextlib.ExitStack() as held:
        wrapped = None
        if is_sandboxed:
            from barnraise.cli.hub.sandbox import script_sandbox

            variables = _script_variables(contributor)
            wrapped = held.enter_context(script_sandbox(contributor, variables, settings))
        kept = await start_script(contributor, wrapped, quiet=quiet)
        return await _follow(kept, _await_region_loss(contributor.credentials, top, settings))


def _await_region_loss(
    credentials: MemberCredentials, top: HubPlace, settings: Settings
) -> Coroutine[Any, Any, None]:
    """Return a coroutine that ends when this machine's region is gone; without a region, never."""
    from barnraise.cli.hub.region import until_region_is_gone
    from barnraise.hub.protocol.invites import HubPlace
    from barnraise.identity.node_id import NodeId

    if credentials.root is None:
        return _never()
    region = HubPlace(
        credentials.addresses,
        credentials.hub_id,
        credentials.pinned,
        credentials.led_from,
        NodeId(credentials.root),
    )
    return until_region_is_gone(region, top, partial(client_of, settings))


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _follow(kept: ChildProcess, region_loss: Coroutine[Any, Any, None]) -> int:
    """Follow the script until it ends, the person leaves, or its region is gone."""
    watch, ended = asyncio.create_task(region_loss), asyncio.create_task(kept.until_ended())
    try:
        await asyncio.wait((watch, ended), return_when=asyncio.FIRST_COMPLETED)
        is_moved = not ended.done()
        (watch if is_moved else ended).result()
    except asyncio.CancelledError:
        say("leaving")
        await kept.stop()
        return LEFT
    finally:
        watch.cancel()
        ended.cancel()
    if is_moved:
        say("this machine's region is gone; it takes another seat, and its script starts again")
        await kept.stop()
        return _MOVED
    await kept.stop()
    say(f"the script {kept.how()}")
    return kept.code


def fit_name(name: str) -> str:
    """Reduce a name to the plain letters that a hub's page shows."""
    plain = re.sub(r"[^A-Za-z0-9 ._-]+", "-", name).lstrip(" ._-")[:64]
    return plain or "friend"


@contextlib.contextmanager
def open_workspace(settings: Settings, run: str) -> Iterator[Path]:
    """Create a folder for a command and delete it afterwards; delete leftovers of killed commands first."""
    top = workspace_root(settings)
    top.mkdir(mode=0o700, exist_ok=True)
    for left in top.iterdir():
        if not is_in_use(left):
            remove_tree(left)
    place = top / f"{fit_name(run)}-{secrets.token_hex(4)}-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        remove_tree(place)
        with contextlib.suppress(OSError):
            top.rmdir()


def keep_results(contributor: JoinedHub, target: Path, settings: Settings) -> None:
    """Copy the files that the script wrote to the folder that the user named."""
    limits = folder_limits(settings)
    changed = changed_since(contributor.manifest, contributor.folder, limits)
    if not changed:
        say("the script wrote no files")
        return
    store = ArtifactStore(contributor.workspace / "written")
    count = unpack_into(store, pack(contributor.folder, store, limits, only=changed).id, target)
    say(f"{counted(count, 'file')} written by the script: {os.path.relpath(target)}")


def _environment(contributor: JoinedHub) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    return others | _script_variables(contributor)


def _script_variables(contributor: JoinedHub) -> dict[str, str]:
    """Return the variables that the script of a hub gets from us."""
    given = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return given | {"BARNRAISE_HUB": str(contributor.workspace / CREDENTIALS_FILE), "PYTHONUNBUFFERED": "1"}


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
