"""Options of a block hold in it, in the blocks inside, and in its thread only."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from barnraise.collectives.per_call import CallOptions, call_options, current_options
from barnraise.core.errors import ConfigError


def test_options_hold_until_the_block_ends() -> None:
    assert current_options() == CallOptions()
    with call_options(timeout=timedelta(seconds=2)):
        assert current_options().timeout_s == 2.0
        with call_options(timeout=5):
            assert current_options().timeout_s == 5.0
        with call_options():
            assert current_options().timeout_s == 2.0
    with pytest.raises(KeyError), call_options(timeout=3):
        raise KeyError
    assert current_options() == CallOptions()


def test_other_threads_do_not_see_the_options() -> None:
    seen: list[CallOptions] = []
    with call_options(timeout=2):
        thread = threading.Thread(target=lambda: seen.append(current_options()))
        thread.start()
        thread.join(60)
    assert seen == [CallOptions()]


def test_new_strategy_replaces_the_tree_of_the_block_around_it() -> None:
    with call_options(timeout=2, strategy="tree", arity=4):
        assert current_options() == CallOptions(2.0, "tree", 4)
        with call_options(arity=5):
            assert current_options() == CallOptions(2.0, "tree", 5)
        with call_options(strategy="centralized"):
            assert current_options() == CallOptions(2.0, "star")
        with call_options(strategy="plain", tree_below_bytes=0):
            assert current_options() == CallOptions(2.0, "plain", None, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "rng"}, "'rng', which does not exist"),
        ({"arity": 4}, "no effect with the strategy None"),
        ({"strategy": "ring", "arity": 4}, "no effect with the strategy 'ring'"),
        ({"strategy": "tree", "arity": 1}, "the arity of a call is 1"),
        ({"tree_below_bytes": 5}, "with the strategy None"),
        ({"strategy": "auto", "tree_below_bytes": 5}, "with the strategy 'auto'"),
        ({"strategy": "plain", "tree_below_bytes": -1}, "tree_below_bytes of a call is -1"),
    ],
)
def test_option_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), call_options(**options):
        pass
    assert current_options() == CallOptions()


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan"), float("inf"), timedelta(0)])
def test_impossible_timeout_is_refused(timeout: float | timedelta) -> None:
    with pytest.raises(ConfigError, match="timeout of a call"), call_options(timeout=timeout):
        pass
