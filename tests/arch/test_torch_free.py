"""Torch-free parts start without torch, in a fresh process."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.arch.source_tree import ROOT, SOURCE, files, is_torch_free, module_name, torch_free_modules

# Importing modules one after the other would hide which one pulled torch in, so each is asked right after.
_IMPORT_ALL = """
import importlib, json, sys
guilty, broken = [], {}
for name in json.loads(sys.argv[1]):
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        broken[name] = str(error)
    if "torch" in sys.modules:
        guilty.append(name)
        break
print(json.dumps({"guilty": guilty, "broken": broken}))
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=200,
    )


def test_torch_free_modules_import_without_torch() -> None:
    done = _python("-c", _IMPORT_ALL, json.dumps(torch_free_modules()))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"guilty": [], "broken": {}}


@pytest.mark.parametrize("module", sorted({".".join(name.split(".")[:2]) for name in torch_free_modules()}))
def test_each_package_imports_first(module: str) -> None:
    """A package that only imports after another one has a hidden cycle."""
    done = _python("-c", f"import {module}, sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["listen", "--help"], ["settings"]])
def test_command_line_starts_without_torch(arguments: list[str]) -> None:
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['barnraise', *{arguments!r}]\n"
        "from barnraise.cli.main import main\n"
        "main()\n"
    )
    done = _python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False"]


def test_no_torch_free_source_names_torch_in_an_import() -> None:
    guilty = []
    for file in files():
        if not is_torch_free(module_name(file)):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            guilty += [module_name(file) for name in names if name.split(".")[0] == "torch"]
    assert guilty == []
