"""Codecs as communication hooks of DistributedDataParallel, on any process group.

    state = compress_gradients(ddp, "int8")

The same by hand: ``ddp.register_comm_hook(GradientHook(ddp.module, "int8", group), average)``.
"""

# No postponed annotations here: DDP inspects those of a hook and rejects strings.
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from barnraise.compression.allreduce.allreduce import AllReduceResult, sum_over
from barnraise.compression.allreduce.error_feedback import ErrorFeedback, FeedbackPart
from barnraise.compression.codecs.codec import Codec, CodecRound
from barnraise.compression.codecs.powersgd import PowerSGD
from barnraise.compression.codecs.registry import codec_named
from barnraise.core.errors import RunError


class GradientHook:
    """State of a hook: the codec, residuals by parameter name, and the step.

    Residuals are kept by parameter, not by bucket, because DDP rebuilds its buckets after the first step.

    ``overlaps``: a separate thread sums while backward continues. No other code may use ``group``
    meanwhile, not even a SyncBatchNorm. Pass a group made for it by `dist.new_group()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        codec: str | Codec | PowerSGD,
        group: dist.ProcessGroup,
        *,
        error_feedback: bool = True,
        decay: float = 1.0,
        overlaps: bool = False,
        if_not_finite: Literal["refuse", "nan"] = "refuse",
        sites: Sequence[Sequence[int]] = (),
    ) -> None:
        self.codec = codec_named(codec) if isinstance(codec, str) else codec
        self.feedback = ErrorFeedback(decay) if error_feedback else None
        self.step = 0
        self.last: AllReduceResult | None = None  # of the last bucket
        self._group = group
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._thread = ThreadPoolExecutor(1, "barnraise-sums") if overlaps else None
        self._if_not_finite = if_not_finite
        self._sites = sites

    def sum(self, buffer: torch.Tensor, parts: list[FeedbackPart], codec_round: CodecRound) -> torch.Tensor:
        """Replace the buffer by the mean over all members, in its own dtype."""
        summed = sum_over(
            self._group,
            buffer,
            self.codec,
            codec_round,
            parts=parts,
            feedback=self.feedback,
            if_not_finite=self._if_not_finite,
            sites=self._sites,
        )
        summed.keep()
        self.last = summed
        return buffer.copy_(summed.values.div_(self._group.size()).view_as(buffer))

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        parts = [
            FeedbackPart(self._name_of(parameter), tuple(parameter.shape))
            for parameter in bucket.parameters()
        ]
        codec_round = CodecRound(f"bucket {bucket.index()}", self.step)
        buffer = bucket.buffer()
        if bucket.is_last():
            self.step += 1
        started: torch.futures.Future[None] = torch.futures.Future()
        if self._thread is None:
            mean = self.sum(buffer, parts, codec_round)
            started.set_result(None)
            return started.then(lambda _: mean)
        running = self._thread.submit(self.sum, buffer, parts, codec_round)
        # DDP does not see an error that is set on a future, only one raised in a callback.
        future = started.then(lambda _: running.result())
        running.add_done_callback(lambda _: started.set_result(None))
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return plain dicts, numbers and tensors. Residuals belong to this member alone."""
        state: dict[str, Any] = {"codec": self.codec.name, "step": self.step}
        if self.feedback is not None:
            state["feedback"] = self.feedback.state_dict()
        if isinstance(self.codec, PowerSGD):
            state["powersgd"] = self.codec.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("codec") != self.codec.name:
            raise RunError(
                f"the state of {state.get('codec')} was loaded into {self.codec.name}",
                hint="Name the codec that was used when the state was saved, or start without it.",
            )
        self.step = int(state["step"])
        if self.feedback is not None and "feedback" in state:
            self.feedback.load_state_dict(state["feedback"])
        if isinstance(self.codec, PowerSGD):
            self.codec.load_state_dict(state["powersgd"])

    def _name_of(self, parameter: torch.Tensor) -> str:
        name = self._names.get(parameter)  # type: ignore[call-overload]
        if name is None:
            raise RunError(
                "the hook's model lacks a parameter that DDP reduces",
                hint="Give the hook the same model as DDP, after its last change.",
            )
        return str(name)


def average(state: GradientHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the future mean of a bucket. Pass this function to `register_comm_hook`."""
    return state.average(bucket)


def compress_gradients(
    ddp: DistributedDataParallel,
    codec: str | Codec | PowerSGD,
    *,
    group: dist.ProcessGroup | None = None,
    error_feedback: bool = True,
    decay: float = 1.0,
    overlaps: bool = False,
    if_not_finite: Literal["refuse", "nan"] = "refuse",
    sites: Sequence[Sequence[int]] = (),
) -> GradientHook:
    """Register the hook and return its state. Save the state with the model, one for each member.

    ``sites``: the group's ranks at each site, equal on every member. Encoded data crosses between sites
    once, and sums inside sites are exact.
    """
    state = GradientHook(
        ddp.module,
        codec,
        group or ddp.process_group,
        error_feedback=error_feedback,
        decay=decay,
        overlaps=overlaps,
        if_not_finite=if_not_finite,
        sites=sites,
    )
    ddp.register_comm_hook(state, average)
    return state
