"""A function becomes a script that any Python can run; what cannot be sent is named, with what to do."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import os.path as paths
import subprocess
import sys
import types
import xml.dom.minidom
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from barnraise.core.errors import RunError
from barnraise.core.files import write_atomically
from barnraise.worker.launch.remote_main import ARGUMENTS, RESULT, SCRIPT, encode_call
from barnraise.worker.launch.script_builder import GeneratedScript, script_of
from barnraise.worker.launch.serializer import decode_values
from tests.repository import ROOT

SOURCE = str(ROOT / "src")

LEVEL = 3
TABLE = {"weights": torch.tensor([1.0, 2.0]), "names": ("a", "b")}
MODEL = torch.nn.Linear(1, 1)
COUNT = 0
FILE = sys.stdout
double = lambda x: 2 * x  # noqa: E731
adds = functools.partial(int, base=2)


def run_alone(function: Callable[..., object], *args: object, folder: Path, **kwargs: object) -> Any:
    """Return the script's result in a fresh process, outside of any cluster."""
    script = script_of(function)
    (folder / SCRIPT).write_text(script.text, encoding="utf-8")
    write_atomically(folder / ARGUMENTS, encode_call(args, kwargs, script.constants))
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, f"{done.stderr}\n{script.text}"
    (result,) = decode_values((folder / RESULT).read_bytes())
    return result


# what is sent


def helper(value: float) -> float:
    return sqrt(value) + LEVEL


class Base:
    def later(self) -> object:
        return Derived  # used before it is defined, and only when called


class Derived(Base):
    step = helper(4)

    def value(self) -> float:
        return self.step


@dataclass
class Config:
    rate: float = 0.5
    layers: list[int] = field(default_factory=list)


def registered(cls: type) -> type:
    return marked(cls)


def marked(cls: type) -> type:
    cls.mark = LEVEL  # type: ignore[attr-defined]
    return cls


@registered
class Marked:
    pass


alias = helper


def everything(a: float, *, b: Missing | None = None) -> dict[str, object]:  # type: ignore[name-defined]  # noqa: F821
    text = """first
        second"""
    global COUNT
    COUNT += 1
    config = Config(layers=[a])  # type: ignore[list-item]
    return {
        "helper": helper(9) + alias(16),
        "derived": Derived().value(),
        "later": Base().later() is Derived,
        "config": [config.rate, config.layers],
        "relu": F.relu(torch.tensor([-1.0, a])),
        "table": TABLE["names"],
        "sum": [int(x) * LEVEL for x in np.arange(3)],
        "mark": Marked.mark,  # type: ignore[attr-defined]
        "path": paths.join("a", "b") == os.sep.join("ab"),
        "xml": xml.dom.minidom.parseString("<a/>").documentElement.tagName,
        "text": text,
        "count": COUNT,
        "b": b,
    }


def test_all_that_a_function_uses_comes_along(tmp_path: Path) -> None:
    result = run_alone(everything, 2.0, folder=tmp_path)
    expected = everything(2.0)
    assert torch.equal(result.pop("relu"), expected.pop("relu"))  # type: ignore[arg-type]
    assert result == expected


def test_generated_script_is_readable() -> None:
    script = script_of(everything)
    assert script.text.startswith('"""Made by barnraise.launch: calls everything on every rank')
    assert script.text.endswith(
        'if __name__ == "__main__":\n    remote_main.main(everything, beside=__file__)\n'
    )
    lines = script.text.splitlines()
    for line in (
        "import torch.nn.functional as F",
        "import os.path as paths",
        "import xml.dom.minidom",
        "from math import sqrt",
        "from dataclasses import dataclass",
        'LEVEL = remote_main.constant("LEVEL", beside=__file__)',
        "alias = helper",
    ):
        assert line in lines
    assert dict(script.constants).keys() == {"LEVEL", "TABLE", "COUNT"}
    assert script.text.count("def helper") == 1
    assert "MODEL" not in script.text
    assert lines.index("class Base:") < lines.index("class Derived(Base):")
    assert script.text.index("def everything(") > script.text.index("class Marked:")
    assert "# From test_script_builder.py, line " in script.text


@torch.no_grad()
def decorated() -> bool:
    return torch.is_grad_enabled()


@functools.lru_cache
def cached() -> int:
    return LEVEL


def calls_cached() -> int:
    return cached()


def test_decorators_are_kept(tmp_path: Path) -> None:
    assert run_alone(decorated, folder=tmp_path) is False
    assert run_alone(calls_cached, folder=tmp_path) == 3


def test_inner_function_without_closure_is_accepted(tmp_path: Path) -> None:
    def inner(times: int) -> str:
        text = """
            kept as it is
        """
        return text * times

    assert run_alone(inner, times=2, folder=tmp_path) == inner(2)


def test_installed_functions_are_imported() -> None:
    script = script_of(torch.nn.functional.softmax)
    assert "from torch.nn.functional import softmax" in script.text
    assert "def softmax" not in script.text


# notebooks


@pytest.fixture
def notebook() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs cells as IPython does: their text is known to linecache under a name that is no file's."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    made = []

    def cell(text: str) -> dict[str, Any]:
        name = f"/nowhere/ipykernel_1/{len(made)}.py"
        made.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), space)
        return space

    yield cell
    for name in made:
        linecache.cache.pop(name, None)


def test_notebook_function_becomes_script(notebook: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    notebook("import torch\nfrom torch import nn\nfrom dataclasses import dataclass\nWIDTH = 4\n")
    notebook("@dataclass\nclass Plan:\n    old: int = 1\n")
    notebook("@dataclass\nclass Plan:\n    epochs: int = 2\n")
    notebook(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(WIDTH, 1)\n\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    space = notebook(
        "def helper(plan):\n    return plan.epochs\n\n"
        "def train(scale):\n"
        "    torch.manual_seed(0)\n"
        "    out = Net()(torch.ones(2, WIDTH))\n"
        "    return {'shape': out.shape, 'epochs': helper(Plan()) * scale}\n"
    )
    assert run_alone(space["train"], 3, folder=tmp_path) == {"shape": torch.Size([2, 1]), "epochs": 6}
    script = script_of(space["train"])
    assert "# From a notebook cell, line 4." in script.text
    assert "old: int" not in script.text


def test_cell_that_was_run_again_uses_newest_source(
    notebook: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    notebook("def f():\n    return 1\n")
    space = notebook("def f():\n    return 2\n")
    assert run_alone(space["f"], folder=tmp_path) == 2


# what is refused


def uses_model() -> object:
    return MODEL


def uses_file() -> object:
    return FILE


def uses_lambda() -> object:
    return double(1)


def uses_partial() -> object:
    return adds("1")


def uses_nothing_known() -> object:
    return nothing_known  # type: ignore[name-defined]  # noqa: F821


def decorator_without_wraps(function: Callable[[], object]) -> Callable[[], object]:
    def wrapper() -> object:
        return function()

    return wrapper


@decorator_without_wraps
def badly_decorated() -> object:
    return None


def wrapped_later() -> object:
    return None


wrapped = torch.no_grad()(wrapped_later)


async def waits() -> None: ...


def yields() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "sentence", "hint"),
    [
        (uses_model, "the global MODEL, which is a Linear", "MODEL.state_dict()"),
        (uses_file, "the global FILE, which is", "Create FILE inside the function"),
        (uses_lambda, "a lambda", "def"),
        (uses_partial, "the global adds, which is a partial", "def"),
        (uses_nothing_known, "nothing_known, which is not defined", "Define nothing_known first"),
        (badly_decorated, "wrapper is a closure: it uses function", "functools.wraps"),
        (wrapped, "wrapped after it was defined", "decorator above its def"),
        (lambda: 1, "is a lambda", "def"),
        (MODEL.forward, "forward is a method", "makes the object"),
        (print, "print is a builtin_function", "def"),
        (adds, "partial is a partial", "def"),
        (waits, "waits is an async function", "asyncio.run"),
        (yields, "yields is a generator", "list"),
        (7, "int is an int", "def"),
    ],
)
def test_unsupported_functions_are_rejected(function: Any, sentence: str, hint: str) -> None:
    with pytest.raises(RunError) as caught:
        script_of(function)
    assert sentence in caught.value.message
    assert hint in caught.value.hint


def test_closure_is_rejected_with_its_variables() -> None:
    model, rate = torch.nn.Linear(1, 1), 0.1

    def train() -> object:
        return model, rate

    with pytest.raises(RunError, match="train is a closure: it uses model, rate of the function") as caught:
        script_of(train)
    assert "Pass model and rate as arguments" in caught.value.hint


def test_class_inside_function_is_rejected(notebook: Callable[[str], dict[str, Any]]) -> None:
    notebook("def make(size):\n    class Inner:\n        width = size\n    return Inner\n\nInner = make(3)\n")
    space = notebook("def train():\n    return Inner.width\n")
    with pytest.raises(RunError, match="Inner, a class that was made inside make"):
        script_of(space["train"])


def test_one_name_for_two_functions_is_refused(notebook: Callable[[str], dict[str, Any]]) -> None:
    space = notebook("def train():\n    return helper()\n\ndef helper():\n    return train\n")
    old = space["train"]
    notebook("def train():\n    return 2\n")
    with pytest.raises(RunError, match="helper uses train, which is not the train that is to be run"):
        script_of(old)


def test_function_from_plain_prompt_is_rejected() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f():\n    return 1\n", space)
    with pytest.raises(RunError, match="has no source"):
        script_of(space["f"])


def test_changed_source_file_is_detected(tmp_path: Path) -> None:
    module = own_module(tmp_path, "changing_model", "def f():\n    return 1\n")
    (tmp_path / "changing_model.py").write_text("import os\n\n\ndef f():\n    return 2\n")
    linecache.checkcache()
    with pytest.raises(RunError, match="has changed since"):
        script_of(module.f)


# modules of one's own


def own_module(folder: Path, name: str, text: str) -> types.ModuleType:
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_own_modules_need_their_folder(
    tmp_path: Path, notebook: Callable[[str], dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: sys.modules.pop("own_layers", None))
    own_module(tmp_path, "own_layers", "SIZE = object()\ndef build():\n    return SIZE is not None\n")
    notebook("import own_layers\nfrom own_layers import build, SIZE\n")
    for line in ("own_layers.build()", "build()", "SIZE"):
        space = notebook(f"def train():\n    return {line}\n")
        with pytest.raises(RunError) as caught:
            script_of(space["train"])
        assert "own_layers, which is a file of yours and is not sent" in caught.value.message
        assert f"folder={str(tmp_path)!r}" in caught.value.hint
        assert isinstance(script_of(space["train"], tmp_path), GeneratedScript)


def test_function_of_own_module_is_sent_as_source_or_folder(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: sys.modules.pop("own_training", None))
    module = own_module(tmp_path, "own_training", "SIZE = 3\n\n\ndef train():\n    return SIZE\n")
    alone = script_of(module.train)
    assert "def train" in alone.text
    assert alone.constants == (("SIZE", 3),)
    together = script_of(module.train, tmp_path)
    assert "from own_training import train" in together.text
    assert "def train" not in together.text
    assert together.constants == ()
