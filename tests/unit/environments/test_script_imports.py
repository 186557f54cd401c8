from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent_client.run_options import ScriptImports
from barnraise.environments.script_imports import scan_imports


def needs(script: str, **others: str) -> ScriptImports:
    files = {"train.py": script.encode()}
    files |= {name.replace("__", "/") + ".py": text.encode() for name, text in others.items()}
    return scan_imports(files, "train.py")


def test_required_and_optional_imports_are_told_apart() -> None:
    imports = needs(
        """
from __future__ import annotations
import os, numpy as np
import torch.nn.functional as F
from typing import TYPE_CHECKING
import barnraise
try:
    import wandb
except ImportError:
    wandb = None
try:
    import always
finally:
    import after
from contextlib import suppress
with suppress(ImportError):
    import apex
if TYPE_CHECKING:
    import pandas
else:
    import runtime
if os.name == "nt":
    import colorama
class Model:
    import inner
def main():
    import matplotlib.pyplot
if __name__ == "__main__":
    import entry
for each in range(2):
    import looped
"""
    )
    assert imports.required == ("numpy", "torch", "always", "after", "runtime", "inner", "entry")
    assert imports.optional == ("wandb", "apex", "colorama", "matplotlib", "looped")
    assert imports.syntax is None


def test_modules_of_the_folder_are_followed() -> None:
    files = {
        "train.py": b"import model.net\nfrom data import loader\nimport lonely\nimport random\n",
        "model/__init__.py": b"from . import heads\nimport einops",
        "model/net.py": b"from .parts.block import Block\nfrom ..nowhere import x\nimport torch",
        "model/heads.py": b"import timm\nif __name__ == '__main__':\n    import only_as_a_script",
        "model/parts/block.py": b"import xformers",
        "data/loader.py": b"import PIL.Image",
        "lonely.py": b"def f():\n    import late\nimport early",
        "random.py": b"import shadowing",
        "unused.py": b"import never",
    }
    imports = scan_imports(files, "train.py")
    wanted = {"einops", "torch", "timm", "xformers", "PIL", "early", "shadowing"}
    assert set(imports.required) == wanted
    assert imports.optional == ("late",)


def test_script_in_a_subfolder_finds_modules_beside_it_and_at_the_top() -> None:
    files = {"src/train.py": b"import beside, top, far", "src/beside.py": b"", "top.py": b"import torch"}
    assert scan_imports(files, "src/train.py") == ScriptImports(required=("far", "torch"))
    assert scan_imports(files, "./src/train.py") == ScriptImports(required=("far", "torch"))


def test_imports_of_an_optional_module_are_optional() -> None:
    imports = needs(
        "try:\n    import extra\nexcept ImportError:\n    pass\nimport main_part",
        extra="import both, maybe\nimport deep",
        deep="import deeper",
        main_part="import both",
    )
    assert imports == ScriptImports(required=("both",), optional=("maybe", "deeper"))
    # The same module, once optional and once required, is required.
    imports = needs("def f():\n    import extra\nimport extra", extra="import x")
    assert imports == ScriptImports(required=("x",))


def test_data_folder_does_not_hide_a_package() -> None:
    files = {"train.py": b"from datasets import load_dataset\nimport tools.mine"}
    files |= {"datasets/fetch.py": b"", "tools/mine.py": b"import torch", "fast.cpython-311.so": b"\0"}
    assert scan_imports(files, "train.py") == ScriptImports(required=("datasets", "torch"))
    files["train.py"] = b"import fast"
    assert scan_imports(files, "train.py") == ScriptImports()


@pytest.mark.parametrize(
    "line",
    [
        "model.cuda()",
        "model = Net().to('cuda')",
        "x.to(f'cuda:{rank}')",
        "torch.device('cuda:0')",
        "torch.zeros(3, device='cuda')",
        "torch.cuda.set_device(rank)",
        "device = 'cuda'",
        "def f():\n        return x.cuda(non_blocking=True)",
    ],
)
def test_cuda_demand_names_its_line(line: str) -> None:
    imports = needs(f"import torch\nif True:\n    {line}")
    assert imports.cuda is not None
    assert imports.cuda.startswith(f"train.py line {3 + line.count(chr(10))} requires CUDA")
    guarded = needs(f"import torch\nif True:\n    {line}\nprint(torch.cuda.is_available())")
    assert guarded.cuda is None


@pytest.mark.parametrize(
    "text",
    [
        "dist.init_process_group('nccl')",
        "parser.add_argument('--device', default='cuda')",
        "def train(device='cuda'): pass",
        "if args.cuda:\n    model.cuda()",
        "if device.type == 'cuda':\n    torch.cuda.set_device(0)",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel.to('cuda')",
        "from torch.cuda import is_available\nx.cuda()",
        "x.to(torch.accelerator.current_accelerator()) or x.cuda()",
        "with torch.autocast('cuda'): pass",
        "print('cuda')",
        "x.to('cudazzz')",
    ],
)
def test_guarded_cuda_is_no_demand(text: str) -> None:
    assert needs(text).cuda is None


def test_guard_of_another_module_does_not_count_and_its_demand_does() -> None:
    imports = needs("import net\ntorch.cuda.is_available()", net="import torch\nx.cuda()")
    assert imports.cuda == "net.py line 2 requires CUDA without a check for it: x.cuda()"
    assert needs("import net\ndist.is_available()\ny.cuda()", net="").cuda is not None


def test_syntax_error_is_named_with_file_and_line() -> None:
    imports = needs("import torch\n\ndef f(:\n    pass")
    assert imports.syntax is not None
    assert imports.syntax.startswith("train.py line 3: invalid syntax: ")
    assert "`def f(:`" in imports.syntax
    imports = needs("import net", net="x = = 1")
    assert imports.syntax is not None
    assert imports.syntax.startswith("net.py line 1: invalid syntax")
    assert scan_imports({"other.py": b""}, "train.py").syntax == "train.py is not in the folder of the run"


@pytest.mark.parametrize(
    "text",
    [b"\0", b"\xff\xfe\x00", b"# coding: no-such\nx", b"x = '\xe9'", b"(" * 5000, b"-" * 100_000 + b"1", b""],
)
def test_invalid_bytes_never_raise(text: bytes) -> None:
    imports = scan_imports({"train.py": text}, "train.py")
    assert imports.required == ()


@given(st.binary(max_size=200), st.text(max_size=20))
def test_random_bytes_and_names_never_raise(text: bytes, script: str) -> None:
    scan_imports({"train.py": text, script: text}, script)


_LINES = st.sampled_from(
    ["import a", "from . import b", "from ..x import y", "from .c import *", "import d.e.f", "x.cuda()"]
)


@given(
    st.dictionaries(st.sampled_from(["a.py", "b.py", "d/e.py", "c/__init__.py", "x/y.py"]), st.lists(_LINES))
)
def test_import_cycles_and_odd_folders_terminate(modules: dict[str, list[str]]) -> None:
    files = {path: "\n".join(lines).encode() for path, lines in modules.items()}
    files["train.py"] = b"import a, b, c, d.e, x.y"
    imports = scan_imports(files, "train.py")
    assert set(imports.required) <= {"a", "b", "c", "d", "x"}
