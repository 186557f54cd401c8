"""Each mutation: which rule it breaks, a text that stands once in the source, what stands there instead.

The text names the place, so that a moved module needs no change here. Tests are named by the end of their
path: `test_trust.py`, or `pairing/test_machine.py` where several files have one name.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A rule that is broken, and the test files of which one must fail then."""

    name: str
    original: str
    mutated: str
    tests: tuple[str, ...]
    only: str = ""  # of a slow file, as `pytest -k` takes it


MEMBERSHIP = (
    Mutation(
        "own-standstill-is-silence",
        "        return min(now, max(self._last_tick, self._peer_table.woke_at) + TICK_S)",
        "        return now",
        ("test_standstill.py",),
    ),
    Mutation(
        "quorum-of-half",
        "return 2 * yes > len(counted) or (2 * yes == len(counted) and counted[0] in agreeing)",
        "return 2 * yes >= len(counted)",
        ("membership/consensus/test_quorum.py",),
    ),
    Mutation(
        "accept-below-a-promise",
        "    if record.promised is not None and question.ballot < record.promised:\n"
        "        return PaxosReply(PaxosReject(after, question.ballot, record.promised), None)",
        "",
        ("membership/consensus/test_paxos.py",),
    ),
    Mutation(
        "promise-below-a-promise",
        "    if record.promised is not None and question.ballot < record.promised:\n"
        "        return PaxosReply(PaxosReject(question.after, question.ballot, record.promised), None)",
        "",
        ("membership/consensus/test_paxos.py",),
    ),
    Mutation(
        "lowest-vote",
        "self._highest is None or vote.ballot > self._highest",
        "self._highest is None or vote.ballot < self._highest",
        ("membership/consensus/test_paxos.py",),
    ),
    Mutation(
        "forgotten-vote",
        "kept = msgspec.structs.replace(record, promised=question.ballot, accepted=vote)",
        "kept = msgspec.structs.replace(record, promised=question.ballot)",
        ("membership/consensus/test_paxos.py",),
    ),
    Mutation(
        "one-witness-of-a-death",
        "if count >= max(2, majority) or (count == 1 and node in own and not askable):",
        "if count >= 1:",
        ("membership/test_failure_detector.py",),
    ),
    Mutation(
        "certificate-of-a-minority",
        "if not is_quorum(before.voters, signers) and not is_quorum(before.voters, signers, absent):",
        "if not signers:",
        ("membership/consensus/test_certificate.py",),
    ),
    Mutation(
        "unchecked-votes",
        "        if not is_vote_signed(vote, text):",
        "        if not vote.signature:",
        ("membership/consensus/test_certificate.py",),
    ),
    Mutation(
        "branch-of-a-minority",
        "if voters and not is_quorum(voters, agreeing, declared):",
        "if voters and not agreeing:",
        ("membership/test_history.py",),
    ),
    Mutation(
        "only-the-oldest-dropped-decision",
        "for link in reversed(self.chain[anchor:]):",
        "for link in self.chain[anchor : anchor + 1]:",
        ("membership/test_history.py",),
    ),
    Mutation(
        "removed-machine-opens-a-branch",
        "if declaration is not None and declaration.node in self.removed:",
        "if declaration is not None and declaration.node in ():",
        ("membership/test_history.py",),
    ),
    Mutation(
        "removals-of-one-branch",
        "self.log = log.barring(map(NodeId, self.removed)) if self.removed else log",
        "self.log = log",
        ("membership/test_history.py",),
    ),
    Mutation(
        "orders-without-a-quorum",
        "return not self._context.member.is_current(self._loop.time())",
        "return False",
        ("agent/runs/test_registry.py",),
    ),
)

IDENTITY = (
    Mutation(
        "guest-admits",
        'if self.role(entry.by) != "owner":',
        "if self.role(entry.by) is None:",
        ("identity/test_trust.py",),
    ),
    Mutation(
        "revoked-returns",
        "        if node in self._revoked:\n",
        "        if False:\n",
        ("identity/test_trust.py",),
    ),
    Mutation(
        "unsigned-entry",
        "if not verify_signature(NodeId(entry.signer), entry.signature, message):",
        "if False:",
        ("identity/test_trust.py",),
    ),
    Mutation(
        "last-owner-removed",
        "if self.owners == (node,):",
        "if False:",
        ("identity/test_trust.py",),
    ),
    Mutation(
        "worker-certificate-unsigned",
        "    _public_key(node).verify(certificate.signature, certificate.tbs_certificate_bytes)\n",
        "",
        ("identity/test_delegation.py",),
    ),
)

TRANSPORT = (
    Mutation(
        "tls-any-run", "    if identity.run != run:\n", "    if False:\n", ("transport/links/test_tls.py",)
    ),
    Mutation(
        "tls-any-node",
        "if expect_node is not None and identity.node != expect_node:",
        "if False:",
        ("transport/links/test_tls.py",),
    ),
    Mutation(
        "tls-any-worker",
        "if expect_worker is not None and identity.worker != expect_worker:",
        "if False:",
        ("transport/links/test_tls.py",),
    ),
    Mutation(
        "preface-of-any-secret",
        "if not hmac.compare_digest(mac, _mac(fields, secret)):",
        "if False:",
        ("transport/listener/test_preface.py",),
    ),
    Mutation(
        "preface-shown-twice",
        "if replays.add(preface.nonce) is not KeyCheck.NEW:",
        "if False:",
        ("transport/listener/test_connection_policy.py",),
    ),
)

PAIRING = (
    Mutation(
        "code-of-many-guesses",
        '            self._state = "answered"\n',
        "            pass\n",
        ("pairing/test_offer.py", "pairing/test_protocol.py"),
    ),
    Mutation(
        "code-without-end",
        'if self._state == "open" and not self.is_psk and now - self._created >= self._lifetime_s:',
        "if False:",
        ("pairing/test_offer.py",),
    ),
    Mutation(
        "role-not-agreed-to",
        "if self._wanted is not None and grant.role != self._wanted:",
        "if False:",
        ("pairing/test_protocol.py",),
    ),
    Mutation(
        "role-not-in-the-log",
        "if log.role(self._key.id) != grant.role:",
        "if False:",
        ("pairing/test_protocol.py",),
    ),
    Mutation(
        "code-tried-again",
        "if is_spent(decode_spent(agent.storage.fact(_SPENT_FACT)), code, time.time()):",
        "if False:",
        ("agent/cluster/test_join.py",),
    ),
)

RUNS = (
    Mutation(
        "guest-in-any-group",
        "        others = list(log.owners)\n",
        "        others = list(log.members)\n",
        ("runs/test_participants.py", "comm_process/test_process.py"),
    ),
    Mutation(
        "link-to-a-removed-machine",
        "if node is not None and node not in self._trusted and isinstance(peer.link, StreamLink):",
        "if False:",
        ("comm_process/test_process.py",),
    ),
    Mutation(
        "run-with-a-removed-machine",
        "if node not in missing and self._context.log.role(NodeId(node)) is not None",
        "if node not in missing",
        ("agent/runs/test_controller.py",),
    ),
    Mutation(
        "failures-of-one-machine-only",
        "if counts[item.node] == highest)",
        "if True)",
        ("runs/control/test_failures.py",),
    ),
    Mutation(
        "ports-scanned-for-a-guest",
        "        if self._is_owner(node):\n",
        "        if True:\n",
        ("diagnostics/test_reachability.py",),
    ),
    Mutation(
        "commit-of-different-bits",
        "if len(holders) == len(old) and len(digests) == 1:",
        "if len(holders) == len(old):",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "commit-without-every-holder",
        "if len(holders) == len(old) and len(digests) == 1:",
        "if len(digests) == 1:",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "commit-over-two-steps",
        "if max_done != min_done + 1:",
        "if max_done < min_done + 1:",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "commit-of-a-unit-twice",
        "        if len(taken) != len(set(taken)):\n            raise ProtocolError(",
        "        if False:\n            raise ProtocolError(",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "commit-not-held-by-another",
        "if any(state.done == min_done and not state.held for _, state in old) or len(digests) != 1:",
        "if len(digests) > 1:",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "commit-held-as-two-results",
        "if any(state.done == min_done and not state.held for _, state in old) or len(digests) != 1:",
        "if any(state.done == min_done and not state.held for _, state in old):",
        ("runs/test_commit.py",),
    ),
    Mutation(
        "step-beyond-the-data",
        "return first, min(first + self.steps_in_round(step, period) * self.batch, self.samples)",
        "return first, first + self.steps_in_round(step, period) * self.batch",
        ("runs/test_sharding.py",),
    ),
    Mutation(
        "order-of-a-guest",
        '        if role == "guest":\n            raise RunError(',
        "        if False:\n            raise RunError(",
        ("agent/runs/test_registry.py",),
    ),
    Mutation(
        "order-of-another-signer",
        "if not verify_signature(NodeId(order.by), record.signature, _PURPOSE + record.order):",
        "if False:",
        ("runs/control/test_lifecycle.py",),
    ),
)

NOTICES = (
    Mutation(
        "notice-of-another-starter",
        "        return self._context.me in (by, log.current(by))",
        "        return True",
        ("agent/notifications/test_service.py",),
        only="started",
    ),
    Mutation(
        "notice-queued-again",
        '"INSERT OR IGNORE INTO notice',
        '"INSERT OR REPLACE INTO notice',
        ("agent/notifications/test_outbox.py",),
    ),
    Mutation(
        "goodbye-is-a-death",
        " or change.node in facts.leaving:",
        ":",
        ("agent/notifications/test_changes.py",),
    ),
    Mutation(
        "encoded-word-in-a-header",
        '.replace("=?", "= ?")',
        "",
        ("agent/notifications/test_mail.py",),
    ),
    Mutation(
        "change-lost-by-a-full-disk",
        "        else:\n            self.save_all()\n        return result",
        "        else:\n            self._save(change)\n        return result",
        ("agent/notifications/test_outbox.py",),
    ),
    Mutation(
        "stall-of-a-machine-that-is-not-heard",
        " or pace.heard_s < _RETURN_S",
        "",
        ("agent/notifications/test_stall.py",),
    ),
    Mutation(
        "mail-without-tls",
        "                server.starttls(context=context)",
        "                server.noop()",
        ("agent/notifications/test_mail.py",),
    ),
)

TRAINING = (
    Mutation(
        "loss-scale-not-divided",
        "flat.mul_(1.0 / (float(self.total_metadata[_WEIGHT]) * scale))",
        "flat.mul_(1.0 / float(self.total_metadata[_WEIGHT]))",
        ("training/gradients/test_grad_scaler.py",),
    ),
    Mutation(
        "units-of-one-weight",
        "alpha=self._last_weight)",
        "alpha=1.0)",
        ("training/gradients/test_reducer.py",),
    ),
    Mutation(
        "nan-of-weight-zero",
        "        if not self._last_weight:\n            self._last.clear()\n",
        "",
        ("training/gradients/test_reducer.py",),
    ),
    Mutation(
        "digest-window-stays",
        "first = (step % max(1, -(-flat.numel() // width))) * width",
        "first = 0",
        ("training/gradients/test_reducer.py",),
    ),
    Mutation(
        "feedback-with-the-wrong-sign",
        "codec.add(residual, payload, codec_round, sign=-1.0)",
        "codec.add(residual, payload, codec_round, sign=1.0)",
        ("compression/allreduce/test_error_feedback.py",),
    ),
    Mutation(
        "feedback-without-decay",
        "torch.add(flat[first:last], residual, alpha=self.decay, out=result[first:last])",
        "torch.add(flat[first:last], residual, out=result[first:last])",
        ("compression/allreduce/test_error_feedback.py",),
    ),
)

FILES = (
    Mutation(
        "manifest-in-any-order",
        "if entry.path <= previous:",
        "if False:",
        ("artifacts/store/test_manifest.py",),
    ),
    Mutation(
        "piece-of-any-content",
        "if len(data) != entry.piece_size(index) or piece_hash(data) != entry.pieces[index]:",
        "if len(data) != entry.piece_size(index):",
        ("artifacts/store/test_store.py",),
    ),
    Mutation(
        "checkpoint-of-any-content",
        "if entry_of(folder / STATE, STATE).object.hex() != manifest.file:",
        "if False:",
        ("checkpoint/test_files.py",),
    ),
    Mutation(
        "array-of-objects",
        "        if _PLAIN_DTYPE.fullmatch(value.dtype.str) is None:\n",
        "        if False:\n",
        ("worker/launch/test_serializer.py",),
    ),
)

HUB_DOOR = (
    Mutation(
        "request-replayed",
        "if check is KeyCheck.REPLAY:",
        "if False:",
        ("hub/protocol/test_signatures.py",),
    ),
    Mutation(
        "request-with-another-body",
        "if arrived.digest != signed.digest:",
        "if False:",
        ("hub/server/test_app_attacks.py",),
    ),
    Mutation(
        "request-for-another-hub",
        "if headers.get(HUB_HEADER) != str(hub):",
        "if HUB_HEADER not in headers:",
        ("hub/protocol/test_signatures.py",),
    ),
    Mutation(
        "request-of-any-age",
        "if abs(clock - signed.created) > WINDOW_S or signed.created < self._began:",
        "if signed.created < self._began:",
        ("hub/protocol/test_signatures.py",),
    ),
    Mutation(
        "hub-of-any-key",
        "if _key_of(made.getpeercert(binary_form=True)) != self.hub.raw:",
        "if False:",
        ("hub/client/test_client.py",),
        only="certificate or key",
    ),
    Mutation(
        "invite-of-any-age", "if clock > grant.expires:", "if False:", ("hub/protocol/test_invites.py",)
    ),
    Mutation(
        "invite-of-many-uses",
        "if grant.uses < 1:\n        raise HubRefused(",
        "if False:\n        raise HubRefused(",
        ("hub/protocol/test_invites.py",),
    ),
)

HUB_JUDGEMENT = (
    Mutation(
        "nothing-trimmed",
        "cut = min(math.floor(trim * count), (count - 1) // 2)",
        "cut = 0",
        ("hub/aggregation/test_aggregate.py",),
    ),
    Mutation(
        "no-cap-of-weights",
        "return [min(weight, times * median) for weight in weights]",
        "return list(weights)",
        ("hub/aggregation/test_aggregate.py",),
    ),
    Mutation(
        "update-of-any-age",
        "    if late > state.terms.stale_limit:\n",
        "    if False:\n",
        ("hub/rounds/test_state_machine.py",),
    ),
    Mutation(
        "copies-count",
        "if any(fingerprint.sha256 == sha256 for fingerprint in earlier):",
        "if False:",
        ("hub/aggregation/test_update_checks.py",),
    ),
    Mutation(
        "any-norm-counts",
        "if median and norm > terms.refuse_over * median:",
        "if False:",
        ("hub/aggregation/test_update_checks.py",),
    ),
    Mutation(
        "no-quarantine",
        "if count >= terms.refusals and not quarantine:",
        "if False:",
        ("hub/aggregation/test_update_checks.py",),
    ),
    Mutation(
        "strangers-word-believed",
        'return 1 if role == "stranger" else max(1, min(claimed, samples))',
        "return max(1, min(claimed, samples))",
        ("hub/aggregation/test_update_checks.py",),
    ),
    Mutation(
        "stranger-cut-to-the-largest-friend",
        "max_norm = min(_max_norm(other, arrival.merged) for other in friends)",
        "max_norm = max(_max_norm(other, arrival.merged) for other in friends)",
        ("hub/aggregation/test_update_checks.py",),
    ),
)

REMOTE_CALLS = (
    Mutation(
        "lease-for-a-lost-rank",
        "        if holder in self._lost:\n"
        "            return f\"rank {holder} is lost\"\n"
        "        counts[holder] = counts.get(holder, 0) + 1",
        "        counts[holder] = counts.get(holder, 0) + 1",
        ("rpc/test_lease_ledger.py",),
    ),
    Mutation(
        "dead-holder-keeps-leases",
        "            counts.pop(holder, None)\n",
        "            pass\n",
        ("rpc/test_lease_ledger.py",),
    ),
    Mutation(
        "late-lease-is-forgotten",
        "                self._return_lease(lending.identity, lending.holder)",
        "                pass",
        ("rpc/test_endpoint.py",),
    ),
    Mutation(
        "stranger-gets-an-object",
        "            if not self._ledger.holds(serial, holder):",
        "            if False:",
        ("rpc/test_owned_objects.py",),
    ),
    Mutation(
        "result-of-any-rank",
        "            if pending is None or pending.rank != rank:",
        "            if pending is None:",
        ("rpc/test_pending_results.py",),
    ),
    Mutation(
        "release-overtakes-a-message",
        "            is_due = self._is_held and not self._pins\n",
        "            is_due = self._is_held\n",
        ("rpc/test_references.py",),
    ),
    Mutation(
        "guest-calls",
        "    guests = roles.run_guests or (not_owners(roles, nodes) if roles.guests else ())",
        "    guests = ()",
        ("rpc/test_connect.py",),
    ),
    Mutation(
        "rpc-of-torch-in-plaintext",
        '    if len(machines) > 1 and environment.get("BARNRAISE_FABRIC") != TRUSTED:',
        "    if False:",
        ("torch_patch/test_torch_rpc.py",),
    ),
)

MUTATIONS = (
    *MEMBERSHIP,
    *IDENTITY,
    *TRANSPORT,
    *PAIRING,
    *RUNS,
    *NOTICES,
    *TRAINING,
    *FILES,
    *HUB_DOOR,
    *HUB_JUDGEMENT,
    *REMOTE_CALLS,
)
