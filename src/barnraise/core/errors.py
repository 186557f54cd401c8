"""Errors of Barnraise, in one tree.

Every error has a stable code, a sentence about what failed, and a hint about what to do.
Each code has a page under ``docs/errors/`` (a test checks it), which ``barnraise explain CODE`` prints.

    BarnraiseError
    ├── ConfigError
    ├── IdentityError
    │   └── TrustError
    ├── TransportError
    │   ├── HandshakeError
    │   ├── ProtocolError
    │   └── ListenerError
    ├── PairingError
    ├── DiscoveryError
    ├── MembershipError
    ├── AgentError
    ├── ShippingError
    ├── RunError
    │   ├── RunEnvironmentError
    │   └── CheckpointError
    ├── StepFailed
    ├── WorkerRefused
    ├── HubError
    │   ├── HubAway
    │   ├── StoreAway
    │   └── HubRefused
    ├── TorchMissing
    └── CollectiveError
        ├── PeerLost
        ├── OperationTimeout
        ├── OperationMismatch
        ├── OperationAborted
        ├── UnsupportedOperation
        ├── UntrustedPickle
        ├── CommProcessLost
        └── RpcError
"""

from __future__ import annotations

from typing import ClassVar


class BarnraiseError(Exception):
    """Base of every error raised on purpose; prints as ``[code] sentence  hint``."""

    code: ClassVar[str] = "barnraise"
    default_hint: ClassVar[str] = "Read the page of this code: barnraise explain barnraise."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint or self.default_hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  -> {self.hint}"


class ConfigError(BarnraiseError):
    """A setting is unknown, has the wrong type, or contradicts another."""

    code = "config"
    default_hint = "Correct the setting named above, in the file or environment variable named above."


class IdentityError(BarnraiseError):
    """A key, node id or certificate cannot be read or does not belong here."""

    code = "identity"
    default_hint = "Check the id for typing errors, or the key file's owner and mode (0600)."


class TrustError(IdentityError):
    """An entry of the trust log is not valid, or two logs contradict each other."""

    code = "trust"
    default_hint = "Run `barnraise doctor`; if one machine's log differs, pair that machine again."


class TransportError(BarnraiseError):
    """A connection could not be made or kept."""

    code = "transport"
    default_hint = "Check that the other machine is on, reachable, and that its firewall allows the port."


class HandshakeError(TransportError):
    """The other side could not prove its identity."""

    code = "handshake"
    default_hint = "Make sure that both machines trust each other's id and share one discovery secret."


class ProtocolError(TransportError):
    """The other side sent bytes that the protocol does not allow."""

    code = "protocol"
    default_hint = "Install the same Barnraise version on both machines; if they agree already, report this."

    def __init__(self, message: str, *, hint: str | None = None, not_finite: bool = False) -> None:
        self.not_finite = not_finite  # the form is right, only the numbers are none
        super().__init__(message, hint=hint)


class ListenerError(TransportError):
    """This machine's listener is missing, busy, or refused the request."""

    code = "listener"
    default_hint = (
        "Start it with `barnraise up --detach` (only without a cluster: `barnraise listen`), "
        "or free the port that it names."
    )


class PairingError(BarnraiseError):
    """Two machines could not be paired."""

    code = "pairing"
    default_hint = "Run `barnraise pair` on a machine of the cluster and type the new code here."


class DiscoveryError(BarnraiseError):
    """No way to look for other machines works here."""

    code = "discovery"
    default_hint = "Run `barnraise doctor`, or name the other machine: `--at HOST`."


class MembershipError(BarnraiseError):
    """The cluster cannot decide what was asked now."""

    code = "membership"
    default_hint = "Start the machines that `barnraise status` names as missing."


class AgentError(BarnraiseError):
    """This machine's agent is missing, or could not do what was asked."""

    code = "agent"
    default_hint = "Start it with `barnraise up`, then try again."


class ShippingError(BarnraiseError):
    """A folder or a data set cannot be packed, sent or unpacked.

    ``is_silence``: no machine sent a piece of it for a long time.
    """

    code = "shipping"
    is_silence = False
    default_hint = "Leave out what the run does not need: list it in `.barnraiseignore`."


class RunError(BarnraiseError):
    """A run cannot be started, found or stopped."""

    code = "run"
    default_hint = "See which runs there are with `barnraise ps`."


class RunEnvironmentError(RunError):
    """A machine lacks what the script needs."""

    code = "run-environment"
    default_hint = "Install what is missing there, use `--env sync`, or leave the machine out with `--on`."


class CheckpointError(RunError):
    """A checkpoint cannot be saved, read or put together."""

    code = "checkpoint"
    default_hint = "Earlier checkpoints are unchanged: correct what the message names, then try again."


class StepFailed(BarnraiseError):
    """A step was applied only in part on this machine, so its worker must start again.

    It is no RunError: a restart helps, because the new worker receives the state.
    """

    code = "step-failed"
    default_hint = "Let the error of the step end the script. The restarted worker receives the state."


class WorkerRefused(BarnraiseError):
    """The other workers of a run refuse this one, and train without it.

    It is no RunError: that would end the run for all.
    """

    code = "worker-refused"
    default_hint = (
        "Give this machine the same script, options, libraries and files as the others. Then start its agent "
        "again: `barnraise down`, `barnraise up --detach`."
    )


class HubError(BarnraiseError):
    """A hub cannot be created, reached or kept."""

    code = "hub"
    default_hint = "Check the hub's address, and that `barnraise hub up` runs there."


class HubAway(HubError):
    """A hub does not answer now, but may later. ``answered``: another server did at its address."""

    code = "hub-away"
    default_hint = "Wait: what was trained is kept. Ask the hub's owner if it lasts."

    def __init__(self, message: str, *, hint: str | None = None, answered: bool = False) -> None:
        self.answered = answered
        super().__init__(message, hint=hint)


class StoreAway(HubError):
    """A hub's object store does not give or take a blob now."""

    code = "store-away"
    default_hint = "Wait: the hub itself has every blob, and the store is tried again."


class HubRefused(HubError):
    """A hub refused what was sent to it."""

    code = "hub-refused"
    default_hint = "Follow the message; the hub's page shows the reason, too."

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        hint: str | None = None,
        retry_s: float = 0.0,
        offset: int | None = None,
    ) -> None:
        self.status = status
        self.kind = kind
        self.retry_s = retry_s
        self.offset = offset
        super().__init__(message, hint=hint)


class TorchMissing(BarnraiseError):
    """torch is not installed, or not in the range that was tested."""

    code = "torch-missing"
    default_hint = "Run `barnraise torch --install`: it installs the torch that fits this machine."


def by_code(code: str, otherwise: type[BarnraiseError]) -> type[BarnraiseError]:
    """Return the error class for a code of another process, if its errors have only a sentence."""
    plain = (
        *(PairingError, DiscoveryError, MembershipError, TrustError, IdentityError, ConfigError),
        *(ShippingError, RunError, RunEnvironmentError, CheckpointError),
    )
    return next((cls for cls in plain if cls.code == code), otherwise)


class CollectiveError(BarnraiseError, RuntimeError):
    """A group operation could not be completed. torch's own errors of groups are RuntimeErrors, too."""

    code = "collective"
    default_hint = "Look at the first failing rank's message; the others only follow it."


class PeerLost(CollectiveError):
    """A member of the group died, was aborted or fell silent."""

    code = "peer-lost"
    default_hint = "Create a new group without that worker, or restart it and create the group with it."

    def __init__(self, peer: int, why: str, *, hint: str | None = None) -> None:
        self.peer = peer
        self.why = why
        super().__init__(f"rank {peer} is lost: {why}", hint=hint)


class OperationTimeout(CollectiveError):
    """The operation timed out although every worker was alive."""

    code = "operation-timeout"
    default_hint = "See what the late ranks named above are doing, or give the group a longer timeout."

    def __init__(self, message: str, *, late: tuple[int, ...] = (), hint: str | None = None) -> None:
        self.late = late
        super().__init__(message, hint=hint)


class OperationMismatch(CollectiveError):
    """Ranks called different operations, or the same one with different arguments."""

    code = "operation-mismatch"
    default_hint = "Make every rank of the group call the same operations in the same order with equal sizes."


class OperationAborted(CollectiveError):
    """The group was aborted or closed by this process while the operation was pending."""

    code = "operation-aborted"
    default_hint = "Create a new group to continue."


class UnsupportedOperation(CollectiveError):
    """The operation does not exist for this dtype, device or reduction."""

    code = "unsupported-operation"
    default_hint = "Convert the tensor to a supported dtype or device first."


class UntrustedPickle(CollectiveError):
    """torch would unpickle bytes that a guest's worker sent."""

    code = "untrusted-pickle"
    default_hint = "Send tensors instead, or name only owners' machines: `barnraise run --on NAMES`."


class CommProcessLost(CollectiveError):
    """The communication process of this worker, which owns its links, exited or stopped answering."""

    code = "comm-process-lost"
    default_hint = (
        "Start the worker again; if it repeats, read the last output of the communication process above."
    )


class RpcError(CollectiveError):
    """A remote call failed where it ran; ``kind`` and ``text``: the type and the text of the error there."""

    code = "rpc"
    default_hint = "Read the output of that rank: it has the whole traceback."

    def __init__(self, rank: int, function: str, kind: str, text: str, *, hint: str | None = None) -> None:
        self.rank = rank
        self.function = function
        self.kind = kind
        self.text = text
        super().__init__(f"{function} failed on rank {rank}: {kind}: {text}", hint=hint)
