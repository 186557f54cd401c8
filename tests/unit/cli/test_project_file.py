"""Options in a project file: what they mean, what overrides them, and what is rejected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from barnraise.cli.main import app
from barnraise.cli.project_file import FILE_NAME, ProjectFileCommand, option_keys, read_project_file
from barnraise.core.errors import ConfigError

RUN = app.commands["run"]
SAMPLE = """\
[run]
on = ["mac", "pc"]
env = "sync"
memory = "8GB"
restarts = 5
trust-fabric = true
data = { mnist = "./mnist", own = "@/data" }
set = { A = "1" }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def parse(*words: str, command: click.Command = RUN) -> dict[str, Any]:
    return command.make_context("barnraise", list(words), **app.context_settings).params


def reject(folder: Path, text: str) -> ConfigError:
    (folder / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("train.py")
    return caught.value


def test_options_of_the_file_are_those_of_the_command_line(folder: Path) -> None:
    words = (
        "--on mac --on pc --env sync --memory 8GB --restarts 5 --trust-fabric --data mnist=mnist "
        "--data own=@/data --set A=1"
    )
    typed = parse(*words.split(), "train.py")
    (folder / FILE_NAME).write_text(SAMPLE)
    assert parse("train.py") == typed


def test_models_of_the_file_are_folders_beside_it_or_ids(folder: Path) -> None:
    (folder / "sub" / "llama").mkdir(parents=True)
    (folder / "sub" / "train.py").touch()
    models = 'model = { a = "./absent", b = "llama", c = "org/name@v1", d = "@/srv/m" }'
    (folder / "sub" / FILE_NAME).write_text(f"[run]\n{models}\n")
    base = Path("sub")
    expected = (f"a={base / 'absent'}", f"b={base / 'llama'}", "c=org/name@v1", "d=@/srv/m")
    assert parse("sub/train.py")["models"] == expected


def test_sample_of_the_documentation_is_valid(folder: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "runs.md"
    sample = page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    (folder / FILE_NAME).write_text(sample)
    assert parse("train.py")["on"] == ("mac", "pc")


def test_command_line_wins_over_the_file(folder: Path) -> None:
    (folder / FILE_NAME).write_text(SAMPLE)
    params = parse("--on", "nas", "--env", "auto", "--restarts", "3", "train.py")
    assert (params["on"], params["environment"], params["restarts"]) == (("nas",), "auto", 3)
    assert params["fabric"] == "trusted"


def test_file_can_be_ignored(folder: Path) -> None:
    without = parse("train.py")
    (folder / FILE_NAME).write_text(SAMPLE)
    assert parse("--no-project-file", "train.py") == without


def test_file_is_beside_the_script_and_paths_start_there(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / FILE_NAME).write_text("[run]\nrestarts = 1\n")
    (folder / "deep" / FILE_NAME).write_text('[run]\nfolder = ".."\ndata = "x=../set"\n')
    params = parse("deep/train.py")
    assert params["restarts"] == 3
    assert params["folder"] == Path("deep/..")
    assert params["data"] == (f"x={Path('deep/../set')}",)


def test_file_of_a_module_is_in_the_folder_that_is_sent(folder: Path) -> None:
    (folder / "sent").mkdir()
    (folder / "sent" / FILE_NAME).write_text("[run]\nrestarts = 1\n")
    assert parse("--folder", "sent", "-m", "module")["restarts"] == 1
    assert parse("-m", "module")["restarts"] == 3


def test_plan_uses_the_keys_that_it_has_options_for(folder: Path) -> None:
    (folder / FILE_NAME).write_text('[run]\non = "pc"\nsync = "auto"\nrestarts = 5\n')
    params = parse("--parameters", "1M", command=app.commands["plan"])
    assert (params["on"], params["sync"]) == (("pc",), "auto")
    assert "restarts" not in params


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('restarts = "5"', "restarts has a wrong value: '5' is not a whole number"),
        ("restarts = true", "restarts has a wrong value: True is not a whole number"),
        ("nice = 20", "nice has a wrong value: 20 is not in the range 0<=x<=19."),
        ("on = 3", "on has a wrong value: 3 is not a list of texts"),
        ("on = [3]", "on has a wrong value: 3 is not a list of texts"),
        ("quiet = 1", "quiet has a wrong value: 1 is not true or false"),
        ('env = "snyc"', "env has a wrong value: 'snyc' is not one of"),
        ("memory = 8", "memory has a wrong value: 8 is not text in quotes"),
        ('memory = "much"', "memory has a wrong value: 'much' is not a size"),
        ('wait = "soon"', "wait has a wrong value: 'soon' is not a time"),
        ('set = "1=2"', "set has a wrong value: --set '1=2' is not NAME=VALUE"),
    ],
)
def test_wrong_value_is_rejected_with_its_place(folder: Path, line: str, words: str) -> None:
    message = reject(folder, f"# options\n[run]\nname = 'x'\n{line}\n").message
    assert message.startswith(f"{FILE_NAME}, line 4: {words}")


def test_unknown_key_is_rejected_with_a_suggestion_and_all_keys(folder: Path) -> None:
    error = reject(folder, "[run]\nmin_nodes = 2\n")
    assert error.message == f"{FILE_NAME}, line 2: 'min_nodes' is not an option of `barnraise run`"
    assert error.hint.startswith("Did you mean min-nodes")
    assert all(key in error.hint for key in option_keys(RUN))


@pytest.mark.parametrize("key", ["dry-run", "json", "picture", "add", "no-project-file", "token"])
def test_option_for_a_single_command_is_rejected(folder: Path, key: str) -> None:
    assert "is not an option" in reject(folder, f"[run]\n{key} = true\n").message


@pytest.mark.parametrize("text", ["on = 'pc'\n", "[runs]\n", "run = 1\n", "[run\n", "[run]\non = pc\n"])
def test_file_that_is_not_a_table_of_options_is_rejected(folder: Path, text: str) -> None:
    assert FILE_NAME in reject(folder, text).message


def test_unreadable_file_is_rejected(folder: Path) -> None:
    (folder / FILE_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_project_file(folder / FILE_NAME, RUN)


def test_help_is_shown_although_the_file_is_wrong(folder: Path) -> None:
    (folder / FILE_NAME).write_text("[run]\nwrong = 1\n")
    done = CliRunner().invoke(app, ["run", "--help", "train.py"])
    assert done.exit_code == 0
    assert FILE_NAME in done.output


def test_options_in_use_are_printed_without_those_typed(folder: Path) -> None:
    @click.command("run", cls=ProjectFileCommand)
    @click.option("--on", multiple=True)
    @click.option("--quiet", is_flag=True)
    @click.option("--env")
    @click.argument("script")
    def command(**_options: object) -> None:
        click.echo("ran")

    (folder / FILE_NAME).write_text('[run]\non = ["mac", "pc"]\nquiet = true\nenv = "sync"\n')
    printed = CliRunner().invoke(command, ["--env", "auto", os.path.join(folder, "train.py")]).output
    assert printed.splitlines() == [
        "barnraise: options from barnraise.toml: on = mac, pc; quiet = true",
        "ran",
    ]
