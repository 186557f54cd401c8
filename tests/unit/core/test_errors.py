from __future__ import annotations

from barnraise.core.errors import CollectiveError, ConfigError, OperationTimeout, PeerLost


def test_error_prints_code_sentence_and_hint() -> None:
    error = ConfigError("the port is wrong", hint="Choose another.")
    assert str(error) == "[config] the port is wrong\n  -> Choose another."


def test_error_without_hint_uses_hint_of_class() -> None:
    assert ConfigError("the port is wrong").hint == ConfigError.default_hint


def test_peer_lost_names_the_peer() -> None:
    error = PeerLost(3, "its process ended")
    assert isinstance(error, CollectiveError)
    assert (error.peer, error.why) == (3, "its process ended")
    assert "rank 3 is lost: its process ended" in str(error)


def test_operation_timeout_names_late_ranks() -> None:
    assert OperationTimeout("all_reduce took too long", late=(1, 2)).late == (1, 2)
