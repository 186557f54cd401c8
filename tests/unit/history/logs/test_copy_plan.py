"""Choice of the logs that a machine copies from another one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.history.logs.copy_plan import HeldLog, logs_to_copy
from benchmarks.invented_run import DESK, MAC, NAS, RUN

_LOG = HeldLog(RUN, MAC, b"i" * 16, 10.0, 500)


def _copied(log: HeldLog, known: HeldLog | None, sender: bytes, linked: tuple[bytes, ...]) -> bool:
    own = {(log.run, log.node): known} if known is not None else {}
    return bool(logs_to_copy([log], own, sender=sender, me=DESK, linked=linked))


@pytest.mark.parametrize(
    ("log", "known", "sender", "linked", "copied"),
    [
        (_LOG, None, MAC, (MAC,), True),
        (_LOG, _LOG, MAC, (MAC,), False),
        (replace(_LOG, size=600), _LOG, MAC, (MAC,), True),
        (replace(_LOG, size=400), _LOG, MAC, (MAC,), True),  # it has shrunk
        (replace(_LOG, identity=b"j" * 16, at=1.0), _LOG, MAC, (MAC,), True),  # it was replaced
        (_LOG, None, NAS, (MAC, NAS), False),  # its writer is here
        (_LOG, None, NAS, (NAS,), True),
        (replace(_LOG, size=400), _LOG, NAS, (NAS,), False),
        (replace(_LOG, identity=b"j" * 16, at=5.0, size=900), _LOG, NAS, (NAS,), False),  # an older file
        (replace(_LOG, identity=b"j" * 16, at=15.0, size=100), _LOG, NAS, (NAS,), True),
        (replace(_LOG, node=DESK), None, NAS, (NAS,), False),  # this machine's own
    ],
)
def test_log_is_copied_if_it_is_better_than_the_known_one(
    log: HeldLog, known: HeldLog | None, sender: bytes, linked: tuple[bytes, ...], copied: bool
) -> None:
    assert _copied(log, known, sender, linked) is copied
