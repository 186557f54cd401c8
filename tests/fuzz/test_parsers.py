"""Every parser of bytes from other machines is known to the fuzzer, has a corpus and survives mutations."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from barnraise.core.errors import ProtocolError
from benchmarks.attacks.fuzz import corpus, targets
from benchmarks.attacks.fuzz.mutation import hostile
from benchmarks.attacks.fuzz.parsers import IN_SESSIONS, OWN_DATA, OWN_MODULES, Parser, all_parsers, is_own
from benchmarks.attacks.fuzz.sites import decoding_sites
from benchmarks.attacks.fuzz.targets import SESSIONS, FuzzError, accepted, run_target, try_input

_CASES = 5000
_MAX_S = 60.0  # for one parser, on a busy machine
_HINT = "see CONTRIBUTING, Fuzzing"


def test_every_place_that_decodes_has_a_parser_or_a_reason() -> None:
    covered = {site for parser in all_parsers().values() for site in parser.sites}
    sites = decoding_sites()
    assert {site for site in sites if site not in covered and not is_own(site)} == set(), _HINT
    assert len(covered) >= 60


def test_rows_about_places_name_places_that_exist() -> None:
    sites = decoding_sites()
    named = {site for parser in all_parsers().values() for site in parser.sites} | {*OWN_DATA, *IN_SESSIONS}
    assert named - sites == set()
    assert set(OWN_MODULES) - {site.partition(":")[0] for site in sites} == set()


def test_site_with_new_decoder_is_found(tmp_path: Path) -> None:
    module = tmp_path / "pack" / "mod.py"
    module.parent.mkdir()
    module.write_text(
        "_kept = msgspec.msgpack.Decoder(int)\n"
        "class Reader:\n"
        "    def read(self, data):\n"
        "        return msgspec.json.decode(data)\n"
        "def plain(data):\n"
        "    return data.decode()\n"
    )
    assert decoding_sites(tmp_path) == {"pack.mod:_kept", "pack.mod:Reader.read"}


def test_every_parser_has_corpus_and_accepts_an_input() -> None:
    assert [name for name in all_parsers() if not corpus.seeds_of(name)] == [], _HINT
    assert [name for name in all_parsers() if not accepted(name)] == [], _HINT


def test_corpus_has_no_file_without_parser() -> None:
    assert {path.stem for path in corpus.FOLDER.glob("*.txt")} - set(all_parsers()) == set()


def test_same_seed_gives_same_inputs() -> None:
    seeds = corpus.seeds_of("trust-entry")
    first, second = Random("trust-entry/3"), Random("trust-entry/3")
    assert [hostile(first, seeds) for _ in range(50)] == [hostile(second, seeds) for _ in range(50)]


def _raise_key_error(data: bytes) -> object:
    raise KeyError("x")


def _reject(data: bytes) -> object:
    raise ProtocolError("it cannot be read")


def test_input_that_raises_another_error_is_reported() -> None:
    with pytest.raises(FuzzError, match=r"bad raised KeyError[^$]*input: 616263"):
        try_input(Parser("bad", _raise_key_error, ()), b"abc")
    assert not try_input(Parser("good", _reject, ()), b"abc")
    assert try_input(Parser("good", len, ()), b"abc")


def test_input_that_takes_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MAX_CASE_S", 0.01)
    with pytest.raises(FuzzError, match="slow took"):
        try_input(Parser("slow", lambda data: sum(range(5_000_000)), ()), b"abc")


def test_parser_that_takes_much_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(random: Random) -> None:
        assert sum(bytearray(300 << 20)[:: 1 << 12]) == 0

    monkeypatch.setitem(SESSIONS, "greedy", hold)
    with pytest.raises(FuzzError, match="greedy: the process held"):
        list(run_target("greedy", 100, 0))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("target", targets.target_names())
def test_mutated_input_breaks_no_parser(target: str) -> None:
    end = time.monotonic() + _MAX_S
    for _ in run_target(target, _CASES, seed=0):
        if time.monotonic() > end:
            break
