"""Commands of the sandbox of Windows. Only their text is tested: no Windows was at hand."""

from __future__ import annotations

from barnraise.sandbox.restricted_token import grant_commands, restricted_command
from barnraise.sandbox.spec import SandboxSpec

SPEC = SandboxSpec(root="/r", directory="/r/folder", writable=("/r/folder",), readable=("/python",))


def test_grant_commands_let_restricted_code_read_python_and_change_the_run() -> None:
    rights = {grant[1]: grant[3] for grant in grant_commands(SPEC)}
    assert rights == {
        "/python": "*S-1-5-12:(OI)(CI)RX",
        "/r/folder": "*S-1-5-12:(OI)(CI)M",
        "/r/home": "*S-1-5-12:(OI)(CI)M",
        "/r/tmp": "*S-1-5-12:(OI)(CI)M",
    }
    assert all(grant[0] == "icacls" for grant in grant_commands(SPEC))


def test_restricted_command_names_grants_before_the_program() -> None:
    command = restricted_command("python.exe", SPEC, ("python.exe", "train.py", "--", "x"))
    assert command[:4] == ("python.exe", "-P", "-m", "barnraise.sandbox.restricted_token")
    assert command[4:6] == ("/python", "*S-1-5-12:(OI)(CI)RX")
    place = command.index("--")
    assert (place - 4) % 2 == 0
    assert command[place + 1 :] == ("python.exe", "train.py", "--", "x")
