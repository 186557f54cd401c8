"""Attacks of one member on a hub in this process."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from barnraise.core.errors import HubRefused
from barnraise.core.flow.rate_limit import RateLimit
from barnraise.core.logs.audit_log import read_audit
from barnraise.hub.aggregation.aggregator import ClosedRound, RoundResult
from barnraise.hub.protocol.invites import HubPlace, make_invite
from barnraise.hub.protocol.messages import (
    PIECE_BYTES,
    Lease,
    RoundConfig,
    SampleSpan,
    decode_message,
    encode_message,
)
from barnraise.hub.protocol.signatures import sign_request
from barnraise.hub.server.bodies import ArrivedBody
from barnraise.hub.server.uploads import UploadService
from barnraise.hub.storage.create import create_invite, known_invites, withdraw_invite
from barnraise.hub.storage.log import Changes, HubLog
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, declared
from tests.unit.hub.in_process_hub import ADDRESS, COURSE, InProcessHub, play, update


def test_member_cannot_remove_blob_of_run(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, eve = await scene.member(), await scene.member()
        await scene.round(ann)
        await scene.round(ann)  # with momentum: it points elsewhere than what ann sent
        hub = scene.hub
        for sha256 in (hub.versions[-1].step.sha256, *hub.founding.kept):
            data = hub.blobs.path(sha256).read_bytes()
            lease = await scene.lease(eve)
            trained = (SampleSpan(7, 0, 1),)
            for changes, kind in (({"samples": 5, "trained": trained}, "lease-differs"), ({}, "copy")):
                with pytest.raises(HubRefused) as caught:
                    await scene.send(eve, declared(lease, data, **changes), data)
                assert caught.value.kind == kind
                assert hub.blobs.has(sha256)

    play(tmp_path, story)


def test_refused_update_keeps_needed_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members send the same bytes at once; the accepted one keeps them."""

    async def story(scene: InProcessHub) -> None:
        ann, eve, idle = await scene.member(), await scene.member(), await scene.member()
        hub, first, second = scene.hub, await scene.lease(ann), await scene.lease(eve)
        await scene.lease(idle)  # so that the round stays open
        data, adopt = update(first), hub.blobs.adopt

        def adopt_late(file: Path, name: str) -> None:
            monkeypatch.setattr(hub.blobs, "adopt", adopt)
            sent = scene.send(ann, declared(first, data), data)
            asyncio.run_coroutine_threadsafe(sent, loop).result(30)
            asyncio.run_coroutine_threadsafe(hub.leave(eve), loop).result(30)
            adopt(file, name)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(hub.blobs, "adopt", adopt_late)
        with pytest.raises(HubRefused, match="lease"):
            await scene.send(eve, declared(second, data), data)
        assert [update.sha256 for update in hub.arrivals.values()] == [hashlib.sha256(data).hexdigest()]
        assert hub.blobs.has(hashlib.sha256(data).hexdigest())

    play(tmp_path, story)


def test_update_refused_during_merge_is_removed_at_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, eve = await scene.member(), await scene.member()
        hub, first, second = scene.hub, await scene.lease(ann), await scene.lease(eve)
        data, late, adopt = update(first), update(second), hub.blobs.adopt
        finisher, may_end = await hub.aggregator(), threading.Event()
        finish = finisher.merge

        def finish_later(closed: ClosedRound) -> RoundResult:
            assert may_end.wait(30)
            return finish(closed)

        def adopt_late(file: Path, name: str) -> None:
            asyncio.run_coroutine_threadsafe(hub.leave(eve), loop).result(30)  # now the round closes
            adopt(file, name)

        monkeypatch.setattr(finisher, "merge", finish_later)
        await scene.send(ann, declared(first, data), data)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(hub.blobs, "adopt", adopt_late)
        with pytest.raises(HubRefused, match="lease"):
            await scene.send(eve, declared(second, late), late)
        assert hub.state.closing
        may_end.set()
        late_blob = hub.blobs.path(hashlib.sha256(late).hexdigest())
        await asyncio.wait_for(scene.until(lambda: hub.version == 1 and not late_blob.exists()), 30)

    play(tmp_path, story)


def test_spent_blobs_are_removed_unless_needed(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        hub = scene.hub
        needed, spent = hub.versions[0].step.sha256, hub.blobs.put(b"spent")
        await hub._commit((), RoundResult((), (), {}, frozenset({needed, spent})))
        assert (hub.blobs.has(needed), hub.blobs.has(spent)) == (True, False)

    play(tmp_path, story)


def test_longest_rounds_have_valid_leases(tmp_path: Path) -> None:
    limits = {"round_s": 86_400.0, "grace": 4.0, "slack_s": 3600.0, "stale_limit": 64}
    longest = msgspec.convert({**msgspec.to_builtins(TERMS), **limits}, RoundConfig)

    async def story(scene: InProcessHub) -> None:
        lease = await scene.lease(await scene.member())
        assert decode_message(Lease, encode_message(lease)).void_s > longest.round_s

    play(tmp_path, story, longest)


def test_member_has_one_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.hub.server.uploads._FRESH_S", 0.0)

    async def story(scene: InProcessHub) -> None:
        eve, before = await scene.member(), scene.partial_files()
        lease = await scene.lease(eve)
        for _ in range(5):
            data = update(lease)
            progress = await scene.intake.declare(eve, declared(lease, data))
            await scene.intake.append(eve, progress.id, 0, ArrivedBody.in_memory(data[:-1]))
            assert scene.partial_files() == before + 1
        scene.intake = UploadService(scene.hub)  # as after a new start
        assert (await scene.intake.declare(eve, declared(lease, data))).offset == len(data) - 1, "it goes on"
        scene.intake = UploadService(scene.hub)
        with pytest.raises(HubRefused, match="no such upload"):
            await scene.intake.append(eve, progress.id, len(data) - 1, ArrivedBody.in_memory(data[-1:]))
        other = update(lease)
        await scene.intake.declare(eve, declared(lease, other))
        assert scene.partial_files() == before
        assert (await scene.send(eve, declared(lease, other), other)).accepted

    play(tmp_path, story)


def test_two_machines_of_site_do_not_cancel_uploads(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        home, lease, first = await scene.half_sent()
        second, name = update(lease), (await scene.intake.declare(home, declared(lease, first))).id
        with pytest.raises(HubRefused, match="not finished") as busy:
            await scene.intake.declare(home, declared(lease, second))
        assert busy.value.status == 503, "it is asked again"
        last = await scene.intake.append(home, name, len(first) - 1, ArrivedBody.in_memory(first[-1:]))
        assert last.accepted
        with pytest.raises(HubRefused) as late:
            await scene.intake.declare(home, declared(lease, second))
        assert late.value.status == 409

    play(tmp_path, story)


def test_stalled_upload_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: InProcessHub) -> None:
        home, lease, _ = await scene.half_sent()
        two = update(lease)
        monkeypatch.setattr("barnraise.hub.server.uploads._FRESH_S", 0.0)  # as after a while
        assert (await scene.send(home, declared(lease, two), two)).accepted

    play(tmp_path, story)


def test_update_with_layout_is_refused(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        eve = await scene.member()
        lease = await scene.lease(eve)
        for changes in ({"layout": LAYOUT}, {"course": COURSE}):
            with pytest.raises(HubRefused, match="no layout"):
                await scene.intake.declare(eve, declared(lease, update(lease), **changes))

    play(tmp_path, story)


def test_single_use_invite_admits_one_of_many_at_once(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS)
        results = await asyncio.gather(*(scene.join(invite) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(result, str) for result in results) == 1
        assert {result.kind for result in results if isinstance(result, HubRefused)} == {"invite-used"}

    play(tmp_path, story)


def test_quarantine_outlasts_update_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: InProcessHub) -> None:
        hub, eve = scene.hub, await scene.member()
        lease = await scene.lease(eve)
        data, adopt = update(lease), hub.blobs.adopt

        async def quarantine() -> None:
            for _ in range(TERMS.refusals):
                await hub.record_refusal(eve, "norm", "too large")

        def adopt_late(file: Path, name: str) -> None:
            asyncio.run_coroutine_threadsafe(quarantine(), loop).result(30)
            adopt(file, name)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(hub.blobs, "adopt", adopt_late)
        with pytest.raises(HubRefused, match="quarantine"):
            await scene.send(eve, declared(lease, data), data)
        assert hub.members[eve].quarantine

    play(tmp_path, story)


def test_lease_that_expires_during_commit_stays_released(tmp_path: Path) -> None:
    """A kill at that moment leaves the samples free in the log."""

    async def story(scene: InProcessHub) -> None:
        hub, eve = scene.hub, await scene.member()
        lease = await scene.lease(eve)
        later = hub.now() + 1e6
        hub.now = lambda: later
        await hub._commit((), RoundResult((), (), {}))
        log = HubLog(scene.directory)
        restored = log.read()
        log.close()
        assert hub.state.pool.returned == lease.spans
        assert not restored.leases

    play(tmp_path, story)


def test_covered_samples_are_right_without_old_versions(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, eve = await scene.member(), await scene.member()
        for _ in range(3):
            await scene.round(ann)
        lease = await scene.lease(eve)
        covered = scene.hub.covered
        assert covered == sum(version.samples for version in scene.hub.versions) == lease.covered > 0
        log = HubLog(scene.directory)
        log.transact([lambda log: log._base.execute("DELETE FROM version WHERE number < 2")])
        log.close()
        scene.hub.reload()
        assert scene.hub.covered == covered

    play(tmp_path, story)


async def _trickle() -> AsyncIterator[bytes]:
    yield b"x"
    await asyncio.sleep(600)


def test_endless_pieces_delay_only_their_sender(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        eve, ann = await scene.member(), await scene.member()
        bad, good = await scene.lease(eve), await scene.lease(ann)
        junk, data = update(bad), update(good)
        async with scene.line() as line:
            upload_id = (await scene.intake.declare(eve, declared(bad, junk))).id
            request_line = f"PATCH /v1/uploads/{upload_id}?offset=0"
            stuck = [
                asyncio.create_task(scene.ask(line, scene.keys[eve], request_line, junk, _trickle()))
                for _ in range(20)
            ]
            await asyncio.sleep(0.2)
            name = (await scene.intake.declare(ann, declared(good, data))).id

            async def whole() -> AsyncIterator[bytes]:
                yield data

            piece = scene.ask(line, scene.keys[ann], f"PATCH /v1/uploads/{name}?offset=0", data, whole())
            answer = await asyncio.wait_for(piece, 20)
            assert (answer.status_code, answer.json()["accepted"]) == (200, True)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    play(tmp_path, story)


def test_piece_of_unknown_upload_is_refused_before_reading(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        eve = await scene.member()
        async with scene.line() as line:
            request_line = f"PATCH /v1/uploads/{'0' * 32}?offset=0"
            answer = await asyncio.wait_for(
                scene.ask(line, scene.keys[eve], request_line, b"x", _trickle()), 20
            )
            assert answer.status_code == 404
            for _ in range(TERMS.refusals):
                await scene.hub.record_refusal(eve, "norm", "too large")
            answer = await asyncio.wait_for(
                scene.ask(line, scene.keys[eve], request_line, b"x", _trickle()), 20
            )
            assert answer.status_code == 403

    play(tmp_path, story)


def test_large_declarations_are_for_owner_only(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        eve = await scene.member()
        async with scene.line() as line:
            answer = await scene.ask(line, scene.keys[eve], "POST /v1/uploads", bytes(PIECE_BYTES + 1))
            assert answer.status_code == 413

    play(tmp_path, story)


def test_unknown_nodes_use_bounded_memory(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        scene.hub.now = lambda: 1000.0
        async with scene.line() as line:
            scene.reception._requests = RateLimit(1.0, 5.0)
            answers = [await scene.ask(line, NodeKey.generate(), "GET /v1/run") for _ in range(20)]
            assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 15
            assert len(scene.reception._nonces._seen) == 5

    play(tmp_path, story)


def test_rate_limit_of_unknown_nodes_is_per_address(tmp_path: Path) -> None:
    """Endless requests from one address do not stop joining members elsewhere."""

    async def story(scene: InProcessHub) -> None:
        scene.hub.now = lambda: 1000.0
        async with scene.line("2001:db8::1") as line:
            scene.reception._strangers, scene.reception._requests = (
                RateLimit(1.0, 3.0),
                RateLimit(1.0, 8.0),
            )
            answers = [await scene.ask(line, NodeKey.generate(), "GET /v1/run") for _ in range(20)]
            assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 17
        for address, status in (("2001:db8::2", 429), ("2001:db8:0:1::1", 200), ("203.0.113.7", 200)):
            async with scene.again(address) as line:
                answer = await scene.ask(line, NodeKey.generate(), "GET /v1/run")
                assert answer.status_code == status, address
        async with scene.again("127.0.0.1") as line:  # a local proxy: all its clients share the total limit
            answers = [await scene.ask(line, NodeKey.generate(), "GET /v1/run") for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2, "all together"

    play(tmp_path, story)


def test_replayed_requests_do_not_use_member_rate_limit(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann = await scene.member()
        scene.hub.now = lambda: 1000.0
        async with scene.line() as line:
            scene.reception._requests = RateLimit(1.0, 5.0)
            headers = sign_request(scene.keys[ann], "GET", "/v1/run", "", b"", scene.hub.id, time.time())
            heard = [await line.get("http://hub/v1/run", headers=headers) for _ in range(9)]
            assert [answer.status_code for answer in heard] == [200] + [401] * 8
            assert (await scene.ask(line, scene.keys[ann], "GET /v1/run")).status_code == 200

    play(tmp_path, story)


def test_uncounted_refusals_do_not_fill_page(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        ann, eve = await scene.member(), await scene.member()
        lease = await scene.lease(ann)
        with pytest.raises(HubRefused, match="another member's lease"):
            await scene.send(eve, declared(lease, b"?"), b"?")
        invented = msgspec.structs.replace(lease, id="0" * 32)
        for _ in range(20):
            with pytest.raises(HubRefused, match="has ended"):
                await scene.intake.declare(eve, declared(invented, b"?"))
        with pytest.raises(HubRefused, match="another member's lease"):
            await scene.send(eve, declared(lease, b"?"), b"?")
        assert [refusal.kind for refusal in scene.hub.refusals] == ["forged", "lease-over", "forged"]
        later = scene.hub.now() + 61.0
        scene.hub.now = lambda: later  # type: ignore[method-assign]
        with pytest.raises(HubRefused, match="has ended"):
            await scene.intake.declare(eve, declared(invented, b"?"))
        assert [refusal.kind for refusal in scene.hub.refusals][3:] == ["lease-over"]

    play(tmp_path, story)


def test_invented_invites_do_not_block_invited_members(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        scene.hub.now = lambda: 1000.0
        invite = create_invite(scene.directory, ADDRESS)
        place = HubPlace(ADDRESS, scene.hub.id, pinned=True)
        invented = make_invite(place, "fireside", role="friend", uses=1, expires=invite.expires)[0]
        async with scene.line() as line:
            scene.reception._joins = RateLimit(1.0, 1.0)
            keys = [NodeKey.generate() for _ in range(3)]
            stolen = replace(invited := invite.request(keys[2].id, "ann"), name="eve")
            joins = [invented.request(keys[0].id, "eve"), stolen, invited]
            answers = [
                await scene.ask(line, key, "POST /v1/members", encode_message(join))
                for key, join in zip(keys, joins, strict=True)
            ]
            assert [answer.status_code for answer in answers] == [403, 403, 200]

    play(tmp_path, story)


def test_expelled_member_cannot_return_with_its_invite(tmp_path: Path) -> None:
    """One person has an invite for ten machines, and joins under another key each time."""

    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS, uses=10)
        eve, ben = await scene.join(invite, "eve"), await scene.join(invite, "ben")
        result = await scene.hub.expel(eve)
        assert (result.invite, result.others) == (scene.hub.members[eve].invite, ("ben",))
        with pytest.raises(HubRefused) as refused:
            await scene.join(invite, "eve again")
        assert refused.value.kind == "invite-withdrawn"
        assert (await scene.lease(ben)).samples, "it is not excluded without the owner's word"
        await scene.hub.pardon(eve)
        with pytest.raises(HubRefused, match="withdrawn"):
            await scene.join(invite, "eve again")

    play(tmp_path, story)


def test_expulsion_withdraws_every_invite_that_the_member_used(tmp_path: Path) -> None:
    """A friend has two invites, and shows both under the same key."""

    async def story(scene: InProcessHub) -> None:
        invites = [create_invite(scene.directory, ADDRESS, uses=10) for _ in range(2)]
        eve = await scene.join(invites[0], "eve")
        await scene.hub.join(eve, invites[1].request(scene.keys[eve].id, "eve"))
        await scene.hub.expel(eve)
        for invite in invites:
            with pytest.raises(HubRefused, match="withdrawn"):
                await scene.join(invite, "eve again")

    play(tmp_path, story)


def test_invites_and_members_are_in_the_audit_log(tmp_path: Path) -> None:
    """Tries to use an invite twice: the log must say which machine came with it, and when it was expelled."""

    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS, uses=2, role="stranger")
        await scene.hub.expel(await scene.join(invite, "eve\u202e"))
        withdraw_invite(scene.directory, str(invite.signer.id))
        with pytest.raises(HubRefused):
            await scene.join(invite, "ben")
        entries = [entry for entry in read_audit(scene.directory) if entry.by != "" or entry.subject]
        made, used, expelled, withdrawn = entries[-4:]
        assert (made.event, made.detail.endswith("as stranger, for 2 machines")) == ("invite-made", True)
        assert (used.event, used.by) == ("invite-used", f"invite {made.subject}")
        assert (expelled.event, expelled.subject) == ("member-expelled", used.subject)
        assert (withdrawn.event, withdrawn.subject) == ("invite-withdrawn", made.subject)
        assert "\u202e" not in used.subject

    play(tmp_path, story)


def test_quarantined_member_cannot_return_with_its_invite(tmp_path: Path) -> None:
    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS, uses=10, role="stranger")
        eve = await scene.join(invite, "eve")
        for _ in range(TERMS.refusals):
            await scene.hub.record_refusal(eve, "norm", "too large")
        with pytest.raises(HubRefused) as refused:
            await scene.join(invite, "eve again")
        assert refused.value.kind == "invite-held"

    play(tmp_path, story)


def test_withdrawal_by_another_process_holds_while_the_hub_uses_the_invite(tmp_path: Path) -> None:
    """The person withdraws the invite between the hub's reading of it and the hub's writing."""

    async def story(scene: InProcessHub) -> None:
        invite = create_invite(scene.directory, ADDRESS, uses=10)
        write = scene.hub.write

        async def write_late(changes: Changes) -> None:
            withdraw_invite(scene.directory, str(invite.signer.id))
            await write(changes)

        scene.hub.write = write_late
        await scene.join(invite, "ann")
        scene.hub.write = write
        (grant,) = [grant for grant in known_invites(scene.directory)[0] if grant.used_by]
        assert (grant.uses, grant.withdrawn) == (9, "the owner withdrew it")
        with pytest.raises(HubRefused, match="withdrew"):
            await scene.join(invite, "ben")

    play(tmp_path, story)
