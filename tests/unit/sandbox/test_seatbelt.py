"""Profile of the sandbox of macOS. Only its text is tested: no macOS was at hand."""

from __future__ import annotations

from barnraise.sandbox.seatbelt import seatbelt_command, seatbelt_profile
from barnraise.sandbox.spec import SandboxSpec

SPEC = SandboxSpec(
    root="/Users/me/state/box",
    directory="/Users/me/state/folder",
    writable=("/Users/me/state/folder",),
    readable=("/Users/me/venv",),
    hidden=("/Users/me/state",),
    broker="/private/tmp/by-1/dial.sock",
)


def test_seatbelt_profile_denies_first_and_allows_the_run_afterwards() -> None:
    rules = seatbelt_profile(SPEC, 4321).splitlines()
    assert rules[:2] == ["(version 1)", "(allow default)"]
    denied = next(rule for rule in rules if rule.startswith("(deny file-read-data"))
    assert '(subpath "/Users")' in denied
    assert '(subpath "/Users/me/state")' in denied
    readable = next(rule for rule in rules if rule.startswith("(allow file-read*"))
    assert '(subpath "/Users/me/venv")' in readable
    assert rules.index(readable) > rules.index(denied), "the last rule that matches counts"
    writable = rules.index("(deny file-write*)")
    assert '(subpath "/Users/me/state/folder")' in rules[writable + 2]
    assert "/Users/me/venv" not in rules[writable + 2]


def test_seatbelt_profile_leaves_broker_and_proxy_as_only_network() -> None:
    rules = seatbelt_profile(SPEC, 4321).splitlines()
    allowed = [rule for rule in rules[rules.index("(deny network*)") :] if "network" in rule]
    assert allowed == [
        "(deny network*)",
        '(allow network-outbound (subpath "/Users/me/state/folder") (subpath "/private/tmp/by-1"))',
        '(allow network-bind network-inbound (local ip "localhost:4321"))',
        '(allow network-outbound (remote ip "localhost:4321"))',
    ]
    assert "(allow signal (target same-sandbox))" in rules


def test_seatbelt_command_quotes_paths() -> None:
    spec = SandboxSpec(root="/r", directory="/r", writable=('/r/a"b\\c',))
    program, option, profile, *command = seatbelt_command(spec, ("python", "train.py"), 1)
    assert (program, option, command) == ("/usr/bin/sandbox-exec", "-p", ["python", "train.py"])
    assert '(subpath "/r/a\\"b\\\\c")' in profile
