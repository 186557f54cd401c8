"""All-reduce of encoded tensors, with the same result bits on every member.

* A codec whose sums can be encoded again uses ``sharded``.
* A sparse codec uses an all-gather: every member gets all payloads and adds them in rank order.
* PowerSGD uses two exact sums of thin matrices.
* If members are at several sites, all of these use ``hierarchical``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from barnraise.compression.allreduce.error_feedback import ErrorFeedback, FeedbackPart
from barnraise.compression.allreduce.exchange import (
    PayloadCheck,
    PayloadExchange,
    PayloadKind,
    PayloadMessage,
)
from barnraise.compression.allreduce.hierarchical import all_reduce_hierarchical
from barnraise.compression.allreduce.sharded import all_reduce_sharded
from barnraise.compression.codecs import powersgd
from barnraise.compression.codecs.codec import Codec, CodecRound, as_flat, check_input_finite, is_finite
from barnraise.compression.codecs.fp32 import Fp32
from barnraise.compression.codecs.powersgd import PowerSGD
from barnraise.core.errors import CollectiveError, OperationMismatch, ProtocolError
from barnraise.core.units import counted, format_size

_FINE: list[PayloadCheck] = []


class AllReduceResult(NamedTuple):
    """The sum, flat in float32, and its traffic: ``sent`` bytes, ``crossed`` of them to other sites.

    ``keep()`` stores the state of error feedback and PowerSGD. Call it after the step was committed. A step
    that is repeated without it starts from the same state and sends the same bytes.
    """

    values: torch.Tensor
    sent: int
    reason: str
    keep: Callable[[], None]
    crossed: int = 0


class _Outcome(NamedTuple):
    total: torch.Tensor
    verdicts: Sequence[PayloadCheck]
    keep: Callable[[], None] | None = None


def sum_over(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    codec: Codec | PowerSGD,
    codec_round: CodecRound,
    *,
    parts: Sequence[FeedbackPart] | None = None,
    feedback: ErrorFeedback | None = None,
    if_not_finite: Literal["refuse", "nan"] = "refuse",
    sites: Sequence[Sequence[int]] = (),
) -> AllReduceResult:
    """Sum a tensor over a group. All members call it with equal sizes, codecs, rounds and sites.

    ``parts``: the named tensors that lie in it one after the other, for residuals by name and for the
    matrices of PowerSGD. By default it is one part, ``codec_round.name``.

    ``if_not_finite``: if numbers of a member are not finite, ``"refuse"`` raises CollectiveError on all
    members. ``"nan"`` returns a sum of NaN, which a GradScaler skips.

    ``sites``: the ranks at each site, if links between sites are slower than inside.
    """
    flat = as_flat(tensor, codec_round.name)
    all_parts = [FeedbackPart(codec_round.name, tuple(tensor.shape))] if parts is None else list(parts)
    if (given := sum(part.numel for part in all_parts)) != flat.numel():
        raise OperationMismatch(
            f"the parts of {codec_round.name!r} have {given} numbers, it has {flat.numel()}"
        )
    exchange = PayloadExchange(group, sites)
    keep_residual = feedback is not None
    values = flat if feedback is None else feedback.compensated(flat, all_parts)
    if exchange.world == 1 or not flat.numel():
        outcome = _single_member(values, keep_residual)
    elif isinstance(codec, PowerSGD):
        outcome = _all_reduce_powersgd(exchange, codec, codec_round, values, all_parts, keep_residual)
    elif codec.is_sparse and not exchange.sites:
        outcome = _all_reduce_gathered(exchange, codec, codec_round, values, keep_residual)
    else:
        outcome = _Outcome(*_all_reduce_encoded(exchange, codec, codec_round, values, keep_residual))
    failed = next((check for check in outcome.verdicts if check.kind is not PayloadKind.FINE), None)
    if failed is not None:
        if if_not_finite == "refuse" or failed.kind is PayloadKind.MALFORMED:
            raise _error(failed, exchange.rank, codec_round, flat, all_parts)
        outcome = _Outcome(torch.full_like(flat, float("nan")), _FINE)

    def keep() -> None:
        if outcome.keep is not None:
            outcome.keep()
        if feedback is not None and failed is None:
            feedback.keep(values, all_parts)

    reason = _reason(codec, exchange, flat.numel())
    return AllReduceResult(outcome.total, exchange.sent, reason, keep, exchange.crossed)


def _all_reduce_encoded(
    exchange: PayloadExchange,
    codec: Codec,
    codec_round: CodecRound,
    values: torch.Tensor,
    keep_residual: bool,
) -> tuple[torch.Tensor, list[PayloadCheck]]:
    through = all_reduce_hierarchical if exchange.sites else all_reduce_sharded
    return through(exchange, codec, codec_round, values, keep_residual)


def _single_member(values: torch.Tensor, keep_residual: bool) -> _Outcome:
    """Return the values of a single member: nothing is sent, so nothing is lost."""
    total = values.clone()
    if keep_residual:
        values.zero_()
    verdict = PayloadCheck(PayloadKind.FINE if is_finite(total) else PayloadKind.NOT_FINITE, 0)
    return _Outcome(total, [verdict])


def _all_reduce_gathered(
    exchange: PayloadExchange,
    codec: Codec,
    codec_round: CodecRound,
    values: torch.Tensor,
    keep_residual: bool,
) -> _Outcome:
    verdict = PayloadCheck(PayloadKind.FINE, exchange.rank)
    try:
        payload = codec.encode(values, codec_round)
    except CollectiveError:
        verdict = PayloadCheck(PayloadKind.NOT_FINITE, exchange.rank)
        size = codec.payload_bytes(values.numel()) if codec.is_fixed else 0
        payload = torch.zeros(size, dtype=torch.uint8, device=values.device)
    sizes = [codec.payload_bytes(values.numel())] * exchange.world
    if not codec.is_fixed:
        max_bytes = sizes[0]
        sizes = [row[0] for row in exchange.all_gather_numbers([payload.numel()], values.device)]
        if not all(0 <= size <= max_bytes for size in sizes):
            raise ProtocolError(f"a worker announced more than the {max_bytes} bytes of {codec.name}")
    arrived = [message for (message,) in exchange.gather(PayloadMessage(verdict, payload), sizes).wait()]
    verdicts = [PayloadCheck(message.verdict.kind, rank) for rank, message in enumerate(arrived)]
    total = torch.zeros_like(values)
    if all(check.kind is PayloadKind.FINE for check in verdicts):
        for message in arrived:
            codec.add(total, message.payload, codec_round)
        if keep_residual:
            codec.add(values, payload, codec_round, sign=-1.0)
        if not is_finite(total):
            verdicts.append(PayloadCheck(PayloadKind.TOO_LARGE, exchange.rank))
    return _Outcome(total, verdicts)


def _all_reduce_powersgd(
    exchange: PayloadExchange,
    power: PowerSGD,
    codec_round: CodecRound,
    values: torch.Tensor,
    parts: Sequence[FeedbackPart],
    keep_residual: bool,
) -> _Outcome:
    split = power.split(parts)
    factors = [power.factor(matrix, codec_round.step).to(values.device) for matrix in split.matrices]
    projections = [matrix.view(values) @ q for matrix, q in zip(split.matrices, factors, strict=True)]
    mark = powersgd.fingerprint(factors, values.device)
    whole = [values[span] for span in split.spans]
    sums, verdicts = _all_reduce_exact(exchange, codec_round, [*projections, *whole, mark])
    if any(check.kind is not PayloadKind.FINE for check in verdicts):
        return _Outcome(values, verdicts)
    powersgd.require_equal(sums[-1], exchange.world)
    bases = [powersgd.orthonormal(projection) for projection in sums[: len(factors)]]
    own = [matrix.view(values).t() @ p for matrix, p in zip(split.matrices, bases, strict=True)]
    summed, verdicts = _all_reduce_exact(exchange, codec_round, own)
    if any(check.kind is not PayloadKind.FINE for check in verdicts):
        return _Outcome(values, verdicts)
    total = torch.empty_like(values)
    for matrix, p, q, own_q in zip(split.matrices, bases, summed, own, strict=True):
        powersgd.restore(p, q, matrix.view(total))
        if keep_residual:
            matrix.view(values).sub_(p @ own_q.t())
    for span, span_sum in zip(split.spans, sums[len(factors) : -1], strict=True):
        total[span] = span_sum
        if keep_residual:
            values[span] = 0.0
    kept = {matrix.name: q for matrix, q in zip(split.matrices, summed, strict=True)}
    return _Outcome(total, verdicts, lambda: power.keep(kept))


def _all_reduce_exact(
    exchange: PayloadExchange, codec_round: CodecRound, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[PayloadCheck]]:
    """Sum several tensors as one in float32, in a fixed order."""
    if not tensors:
        return [], _FINE
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    total, verdicts = _all_reduce_encoded(exchange, Fp32(), codec_round, joined, keep_residual=False)
    sums = torch.split(total, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(sums, tensors, strict=True)], verdicts


def _error(
    failed: PayloadCheck,
    rank: int,
    codec_round: CodecRound,
    flat: torch.Tensor,
    parts: Sequence[FeedbackPart],
) -> CollectiveError | ProtocolError:
    if failed.kind is PayloadKind.MALFORMED:
        return ProtocolError(
            f"rank {failed.rank} sent a payload of {codec_round.name!r} that cannot be decoded"
        )
    if failed.kind is PayloadKind.TOO_LARGE:
        return CollectiveError(
            f"the sum of {codec_round.name!r} over all ranks is too large for float32",
            hint="Lower the learning rate or the loss scale, or clip the gradient.",
        )
    if failed.rank != rank:
        return CollectiveError(
            f"rank {failed.rank} holds numbers of {codec_round.name!r} that are not finite"
        )
    try:
        for part, values in zip(parts, torch.split(flat, [part.numel for part in parts]), strict=True):
            check_input_finite(values, part.name)
    except CollectiveError as error:
        return error
    return CollectiveError(f"{codec_round.name!r} is too large for float32 together with its residual")


def _reason(codec: Codec | PowerSGD, exchange: PayloadExchange, numel: int) -> str:
    if not exchange.sent:
        return f"{codec.name}: nothing is sent, because there is one worker or nothing to sum"
    if exchange.sites:
        where = f"{counted(exchange.world, 'member')} at {counted(len(exchange.sites), 'site')}"
        sent, crossed = format_size(exchange.sent), format_size(exchange.crossed)
        return f"{codec.name} over {where}: {sent} sent by this worker, {crossed} of it to other sites"
    plain = 8 * numel * (exchange.world - 1) / exchange.world
    return (
        f"{codec.name} over {counted(exchange.world, 'member')}: {format_size(exchange.sent)} sent by each, "
        f"{plain / exchange.sent:.1f} times less than fp32"
    )
