"""Attacks on the invites of a hub: by its proxy, by friends that were expelled, and by local users."""

from __future__ import annotations

import contextlib

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from barnraise.hub.private_options import PrivateOptions
from barnraise.hub.protocol.admission import AdmissionStatement, admission_request
from barnraise.hub.protocol.invites import invite_text
from barnraise.hub.protocol.messages import ExpelResponse, JoinRequest, Role, decode_message
from barnraise.hub.storage.create import withdraw_invite
from barnraise.hub.storage.log import LogReplica
from barnraise.identity.keys import NodeKey
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.hub import AttackedHubRun
from benchmarks.hub.process import HubProcess


@attack(
    "proxy-takes-invite",
    "hub's proxy",
    "keeps a friend's request to join back, and joins with what is in it",
    AttackedHubRun,
)
def take_invite(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite()
    thief = scene.leaf(invite, "thief")
    refusals: list[str] = []

    def look(method: str, path: str, body: bytes) -> None:
        if (method, path) == ("POST", "/v1/members"):
            seen = decode_message(JoinRequest, body)
            assert invite.key.hex() not in body.hex(), "the invite's key was sent"
            forged = (replace(seen, name="thief"), replace(seen, name="thief", invite=str(thief.key.id)))
            refusals.extend(scene.refusal(thief, request) for request in forged)

    scene.proxy.look = look
    try:
        scene.join(scene.through_proxy(invite), "victim")
    finally:
        scene.proxy.look = lambda method, path, body: None
    assert len(refusals) == 2, f"the proxy saw {len(refusals)} requests"
    assert "thief" not in scene.members()
    assert "victim" in scene.members(), "the friend's only use was gone"
    return f"refused as {' and '.join(sorted(set(refusals)))}; the friend joined"


@attack(
    "friend-forges-role",
    "friend",
    "signs a request for the role owner, mirror or region with its own invite",
    AttackedHubRun,
)
def forge_role(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite(uses=10)
    roles: tuple[Role, ...] = ("owner", "mirror", "region")
    for role in roles:
        leaf = scene.leaf(invite, "climber")
        assert scene.refusal(leaf, replace(invite, role=role).request(leaf.key.id, "climber")) == "invite"
    assert "climber" not in scene.members()
    return "the hub knows the role of the invite"


@attack(
    "expelled-returns",
    "friend",
    "is expelled, and joins under other keys with its invite for ten machines",
    AttackedHubRun,
)
def return_after_expulsion(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite(uses=10)
    expelled, other = scene.join(invite, "expelled"), scene.join(invite, "other")
    owner = scene.leaf(invite, "owner", scene.hub.owner)
    path = f"/v1/members/{expelled.key.id}/expel"
    result = scene.run(owner.ask("POST", path, ExpelResponse))
    assert result.others == (other.name,), "the owner does not learn of the other seat"
    for _ in range(8):
        again = scene.leaf(invite, "expelled again")
        kind = scene.refusal(again, invite.request(again.key.id, again.name))
        assert kind == "invite-withdrawn", kind
    return "its invite was withdrawn, and its other seat named"


@attack(
    "withdrawn-invite-used",
    "stranger at a hub",
    "joins with an invite that its owner has withdrawn",
    AttackedHubRun,
)
def use_withdrawn_invite(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite("stranger", uses=10)
    withdraw_invite(scene.hub.directory, str(invite.signer.id))
    leaf = scene.leaf(invite, "late")
    assert scene.refusal(leaf, invite.request(leaf.key.id, "late")) == "invite-withdrawn"
    return "refused while the hub was up"


@attack(
    "mirror-joins-with-copy",
    "friend",
    "keeps a mirror, and joins with what the copy of the hub's log holds",
    AttackedHubRun,
)
def join_with_copy(scene: AttackedHubRun) -> str:
    mirror = scene.join(scene.hub.invite("mirror"), "mirror")
    unused = scene.hub.invite(uses=10)
    replica = scene.run(mirror.ask("GET", "/v1/replica", LogReplica))
    grants = {grant.key: grant for grant in replica.grants}
    grant, thief = grants[str(unused.signer.id)], scene.leaf(unused, "copy")
    for secret in (unused.signer.id.raw, mirror.key.id.raw):
        statement = AdmissionStatement(
            hub=unused.hub,
            member=thief.key.id.raw,
            invite=unused.signer.id.raw,
            role=grant.role,
            run=unused.run,
            expires=grant.expires,
        )
        signer = NodeKey(Ed25519PrivateKey.from_private_bytes(secret))
        assert scene.refusal(thief, admission_request(signer, statement, "copy")) == "invite"
    return "the copy holds public keys only"


@attack(
    "arguments-show-invite",
    "other local user",
    "reads the arguments and the files of a region's process",
    AttackedHubRun,
)
def read_arguments(scene: AttackedHubRun) -> str:
    secret = "https://127.0.0.1:1/kQ3v9mXwTz7b"
    invite = scene.hub.invite("region")
    region = HubProcess(scene.folder / "region", None)
    try:
        private = PrivateOptions(parent=invite_text(invite), offer=(secret,))
        region.start("--seats", "1", private=private)
        process = psutil.Process(region.pid)
        words = process.cmdline()
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                words += child.cmdline()
        assert words, "its arguments cannot be read, so nothing was tried"
        assert not any(invite_text(invite) in word or secret in word for word in words), "they show it"
        left = list(scene.folder.glob("*.private"))
        assert not left, f"the file with the options is still there: {left}"
    finally:
        region.kill()
    return "neither the invite nor the secret address is there"
