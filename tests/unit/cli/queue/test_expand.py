"""Lists and ranges in the arguments of jobs."""

from __future__ import annotations

import pytest

from barnraise.cli.queue.expand import expand_arguments, expand_value, lift_options, parse_jobs
from barnraise.core.errors import RunError


def test_arguments_are_the_product_of_lists_and_ranges() -> None:
    expanded = expand_arguments(["--lr", "1e-4,3e-4", "--seed=0..1", "--fast"], 100)
    assert expanded.commands == [
        ("--lr", "1e-4", "--seed=0", "--fast"),
        ("--lr", "1e-4", "--seed=1", "--fast"),
        ("--lr", "3e-4", "--seed=0", "--fast"),
        ("--lr", "3e-4", "--seed=1", "--fast"),
    ]
    assert expanded.swept == [("--lr", 2), ("--seed", 2)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0..3", ["0", "1", "2", "3"]),
        ("3..1", ["3", "2", "1"]),
        ("-1..1", ["-1", "0", "1"]),
        ("0..10..5", ["0", "5", "10"]),
        ("0..2,7,7", ["0", "1", "2", "7"]),
        ("adam,sgd", ["adam", "sgd"]),
        ("plain", ["plain"]),
        ("../data", ["../data"]),
        ("a, b", ["a, b"]),
        ('{"a":1,"b":2}', ['{"a":1,"b":2}']),
        ("(1,2)", ["(1,2)"]),
        ("a,,b", ["a,,b"]),
        ("", [""]),
    ],
)
def test_value_is_a_list_a_range_or_itself(text: str, values: list[str]) -> None:
    assert expand_value(text) == values


def test_arguments_after_two_dashes_stay_as_they_are() -> None:
    expanded = expand_arguments(["--seed", "0..1", "--", "--names", "a,b"], 100)
    assert expanded.commands == [("--seed", "0", "--names", "a,b"), ("--seed", "1", "--names", "a,b")]


def test_no_arguments_make_one_job() -> None:
    assert expand_arguments([], 100).commands == [()]


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(RunError, match="1,000,000 combinations; at most 1,000"):
        expand_arguments(["0..999", "0..999"], 1000)
    with pytest.raises(RunError, match="too many values"):
        expand_arguments(["0..999999999"], 1000)
    with pytest.raises(RunError, match="too many values"):
        expand_arguments(["0..5..0"], 1000)


def test_numbers_of_jobs_are_read() -> None:
    assert parse_jobs(["3", "5-7,9", "3"]) == [3, 5, 6, 7, 9]
    for text in ("x", "3-", "-3", "1-99999999"):
        with pytest.raises(RunError):
            parse_jobs([text])


def test_options_of_the_queue_may_stand_after_the_script() -> None:
    own = {"--each": True, "--after": True}
    words = ["train.py", "--lr", "1,2", "--each", "machine", "--after=3", "--", "--each", "x"]
    assert lift_options(words, own) == [
        *("--each", "machine", "--after=3", "train.py", "--lr", "1,2", "--", "--each", "x"),
    ]
