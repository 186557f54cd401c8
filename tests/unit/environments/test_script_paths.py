"""Absolute paths that a script names are paths in its text."""

from __future__ import annotations

import pytest

from barnraise.environments.script_paths import absolute_paths, data_hint

SCRIPT = b'''\
"""/home/anna/in-a-docstring"""
import parts
FOLDER = "/home/anna/pictures"
open("data/here.csv"), open("~/mnist"), open("/dev/null"), open("/tmp/x"), "a / b", "/", "https://x/y"
again = "/home/anna/pictures"
windows = r"D:\\data\\cats"
'''


def test_absolute_paths_are_found_once_without_system_paths() -> None:
    files = {"train.py": SCRIPT, "parts.py": b"BASE = '/srv/base.csv'\n", "other.py": b"X = '/srv/no'\n"}
    paths = absolute_paths(files, "train.py")
    assert {(item.file, item.line, item.path) for item in paths} == {
        ("train.py", 3, "/home/anna/pictures"),
        ("train.py", 4, "~/mnist"),
        ("train.py", 6, "D:\\data\\cats"),
        ("parts.py", 1, "/srv/base.csv"),
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [("/home/anna/My Pictures/", "my_pictures"), ("/srv/base.csv", "base"), ("/srv/2024", "data")],
)
def test_data_hint_names_option_and_variable(path: str, name: str) -> None:
    assert data_hint(path) == (f"--data {name}={path}", f'os.environ["BARNRAISE_DATA_{name.upper()}"]')
