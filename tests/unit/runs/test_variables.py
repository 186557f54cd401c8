"""Variables of a run: names and a commitment in the spec, values apart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from barnraise.core.errors import RunError
from barnraise.runs.record import sign_spec
from barnraise.runs.variables import MAX_BYTES, VariableNames, seal
from tests.unit.runs.control.test_lifecycle import KEY, order

SECRET = "hf_a-very-secret-token"


def test_spec_and_record_have_no_value_of_a_variable() -> None:
    values = seal((("HF_TOKEN", SECRET), ("MODE", "offline")))
    assert values is not None
    record = sign_spec(replace(order(), variables=values.names), KEY)
    assert b"HF_TOKEN" in record.order
    assert SECRET.encode() not in record.order
    assert b"offline" not in record.order


def test_names_match_exactly_the_sealed_values() -> None:
    values = seal((("A", "1"), ("B", "2")))
    assert values is not None
    assert values.names.names == ("A", "B")
    assert replace(values, values=(("A", "1"), ("B", "3"))).names != values.names
    assert replace(values, salt=bytes(32)).names != values.names
    again = seal((("A", "1"), ("B", "2")))
    assert again is not None
    assert again.names.digest != values.names.digest, "a short value cannot be guessed from the digest"


def test_seal_of_nothing_is_none() -> None:
    assert seal(()) is None
    assert VariableNames().names == ()


def test_seal_of_repeated_name_keeps_the_last_value() -> None:
    values = seal((("A", "1"), ("A", "2")))
    assert values is not None
    assert values.values == (("A", "2"),)


def test_seal_of_long_values_is_rejected() -> None:
    with pytest.raises(RunError, match="at most 128 KiB are possible"):
        seal(tuple((f"V{number}", "x" * 30_000) for number in range(MAX_BYTES // 30_000 + 1)))
