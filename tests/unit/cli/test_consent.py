"""The question before code of another person runs here, with a hostile sender."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import AcceptRunResponse, DataRow
from barnraise.cli import consent
from barnraise.cli.consent import ClusterReach, OfferedData, OfferedRun, describe
from barnraise.cli.runs.runs import offered_run

# It erases the line of the question, writes another one, and conceals the rest.
FORGED = (
    "train.py\r\x1b[2KIt would run, as you: python train.py --epochs 3\x1b[8m",
    "-c",
    "import os; os.system('id')",
    "\x1b[28m",
)
OWNER = ClusterReach("owner", ["pc (1EF2-9K3M)", "nas (QZX4-DWWX)"])


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def offered(*command: str, **changes: object) -> OfferedRun:
    given: dict[str, object] = {
        "heading": "pc (1EF2-9K3M) asks this machine to take part in run train-k3f9. It would run, as you:",
        "command": command or ("train.py", "--epochs", "3"),
        "files": [("train.py", 1200)],
        "file_count": 1,
        "file_bytes": 1200,
    }
    return OfferedRun(**(given | changes))  # type: ignore[arg-type]


def rows(text: str) -> dict[str, str]:
    """Return the text beside each label, its lines joined."""
    texts: dict[str, str] = {}
    label = ""
    for line in text.splitlines():
        if line.startswith("  ") and line[2:3] not in ("", " "):
            label, _, rest = line.strip().partition(" ")
            texts[label] = rest.strip()
        elif label:
            texts[label] += f" {line.strip()}"
    return texts


def width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line)


def test_question_shows_all_that_a_person_agrees_to() -> None:
    text = describe(
        offered(
            "train.py",
            "--epochs 3",
            variables=[("HF_TOKEN", "abc"), ("LD_PRELOAD", "/tmp/x.so"), ("PYTHONSTARTUP", "x.py")],
            data=[
                OfferedData("mnist", "", 4, 11 << 20),
                OfferedData("home", "/home/u"),
                OfferedData("base", "", 2, 3 << 30, True, "org/x\x1b[2J@main"),
                OfferedData("other", "/srv/m", is_model=True),
            ],
            image="example.org/torch:2",
            packages="requirements.txt",
            package_count=12,
            reach=OWNER,
            sandbox="bubblewrap: it sees its own folder only",
        )
    )
    shown = rows(text)
    assert text.startswith("pc (1EF2-9K3M) asks this machine"), "the sender, with an id"
    assert shown["command"] == "python train.py '--epochs 3'"
    assert shown["files"].endswith("train.py")
    assert "CAREFUL, it can load other code: LD_PRELOAD=/tmp/x.so" in shown["variables"]
    assert "CAREFUL, it can load other code: PYTHONSTARTUP=x.py" in shown["variables"]
    assert shown["variables"].endswith(" HF_TOKEN=abc")
    assert shown["data"] == (
        "mnist: 4 files, 11 MiB are sent to this machine home: reads /home/u of this machine "
        "base: model called org/x?[2J@main, 2 files, 3 GiB are sent to this machine, or copied from its "
        "Hugging Face cache if that has the same other: model reads /srv/m of this machine"
    )
    assert shown["image"] == "example.org/torch:2"
    assert shown["packages"].startswith("12 packages of requirements.txt are installed")
    assert "owner of a cluster with pc (1EF2-9K3M), nas (QZX4-DWWX)" in shown["reaches"]
    assert "run code on them, unless it is sandboxed" in shown["reaches"]
    assert shown["sandbox"] == "bubblewrap: it sees its own folder only"


def test_question_says_what_there_is_not() -> None:
    shown = rows(describe(offered()))
    assert (shown["variables"], shown["data"]) == ("none", "none")
    assert shown["image"].startswith("none")
    assert shown["packages"] == "none are installed"
    assert shown["sandbox"] == consent.NO_SANDBOX
    assert (
        "guest of a cluster with pc"
        in rows(describe(offered(reach=ClusterReach("guest", ["pc"]))))["reaches"]
    )


def test_forged_command_is_shown_as_it_is() -> None:
    text = describe(offered(*FORGED))
    assert all(line.isprintable() for line in text.splitlines())
    shown = rows(text)["command"]
    assert "os.system(" in shown
    assert shown.startswith("python 'train.py??[2KIt would run")
    assert shown.endswith("CAREFUL: it has hidden control characters, shown as ?")


@pytest.mark.parametrize(
    "text",
    ["sandbox    on " * 40, "x" * 3000, "日本" * 300, "e\u0301" * 400, "a\u202eb" * 90, "\n  sandbox  on"],
    ids=["label", "long", "wide", "marks", "direction", "line"],
)
def test_no_text_of_the_sender_makes_a_line_of_ours(text: str) -> None:
    """Labels begin in the third column; what is wrapped, or too wide, begins further to the right."""
    shown = describe(
        offered(
            text,
            text,
            files=[(text, 1)] * 40,
            file_count=40,
            file_bytes=40,
            variables=[(text, text)] * 200,
            data=[OfferedData("d", text)] * 3,
            image=text,
            packages=text,
            reach=ClusterReach("owner", [text[:64]]),
        )
    )
    lines = shown.splitlines()
    assert max(map(width, lines)) <= 80
    labels = [line.split()[0] for line in lines[1:] if line.startswith("  ") and line[2] != " "]
    assert [label for label in labels if label != "as"] == [
        "command",
        "files",
        "variables",
        "data",
        "image",
        "packages",
        "reaches",
        "sandbox",
    ]
    assert len(lines) < 400


def test_question_counts_what_it_does_not_show() -> None:
    shown = rows(describe(offered("x" * 5000, variables=[(f"V{number}", "1") for number in range(100)])))
    assert "NOT ALL OF IT IS SHOWN" in shown["command"]
    assert "NOT ALL ARE SHOWN: 76 more" in shown["variables"]


def test_dangerous_variables_come_first() -> None:
    many = [(f"V{number}", "1") for number in range(100)] + [("DYLD_INSERT_LIBRARIES", "/x")]
    assert rows(describe(offered(variables=many)))["variables"].startswith(
        "CAREFUL, it can load other code: DYLD"
    )


@pytest.mark.parametrize("name", ["LD_AUDIT", "PYTHONPATH", "PATH", "https_proxy", "PIP_INDEX_URL", "HOME"])
def test_variable_that_changes_code_is_dangerous(name: str) -> None:
    assert consent.is_dangerous(name)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_MODE", "OMP_NUM_THREADS", "EPOCHS"])
def test_ordinary_variable_is_not_dangerous(name: str) -> None:
    assert not consent.is_dangerous(name)


def test_offered_run_of_a_response_has_every_field() -> None:
    response = AcceptRunResponse(
        run="train-k3f9",
        by="pc",
        by_id="1EF2-9K3M",
        command=("train.py",),
        variables=(("A", "1"),),
        data=(DataRow("d", "/home/u"), DataRow("m", "", 1, 2, True, "a/b@main")),
        image="i",
        packages="uv.lock",
        package_count=3,
        role="guest",
        machines=("pc (1EF2-9K3M)",),
        sandbox="yes",
    )
    question = offered_run(response)
    assert question.heading.startswith("pc (1EF2-9K3M) asks this machine to take part in run train-k3f9.")
    assert question.data == [OfferedData("d", "/home/u"), OfferedData("m", "", 1, 2, True, "a/b@main")]
    assert (question.image, question.packages, question.package_count, question.sandbox) == (
        "i",
        "uv.lock",
        3,
        "yes",
    )
    assert question.reach == ClusterReach("guest", ("pc (1EF2-9K3M)",))


PROGRAM = f"""
from barnraise.cli.consent import OfferedRun, agrees
run = OfferedRun(heading="pc asks.", command={FORGED!r}, files=[], file_count=0, file_bytes=0)
print("AGREED" if agrees(run, "Let it run?", yes=False) else "NOTHING")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
@pytest.mark.parametrize(("answer", "result"), [(b"y\n", "AGREED"), (b"\n", "NOTHING"), (b"\x04", "NOTHING")])
def test_question_at_a_terminal(tmp_path: Path, answer: bytes, result: str) -> None:
    """A person types at a pseudo-terminal; every byte that it gets is shown text or the end of a line."""
    import pty

    own, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=other, stdout=other, stderr=other, env=environment
    ) as process:
        os.close(other)
        os.write(own, answer)
        output = b""
        while True:
            try:
                data = os.read(own, 65536)
            except OSError:  # Linux, when the last process has closed it
                break
            if not data:
                break
            output += data
        assert process.wait(30) == 0
    os.close(own)
    text = output.decode()
    assert result in text
    assert "os.system(" in text, "what was to be concealed"
    without_echo = text.replace("^D\x08\x08", "")
    assert not set(without_echo) & set(map(chr, (*range(10), 11, 12, *range(14, 32), *range(127, 160))))
    lines = without_echo.split("\r\n")
    assert all("\r" not in line for line in lines), "no line is written over another"
    assert sum("It would run, as you: python train.py --epochs" in line for line in lines) == 1
