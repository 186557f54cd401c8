"""Scripts that train one model together are told from those that would train one model each."""

from __future__ import annotations

import pytest

from barnraise.environments.training_style import replaceable_trainer, training_style
from tests.repository import ROOT

PLAIN = b"import torch\nmodel = torch.nn.Linear(1, 1)\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PLAIN, "separate"),
        (b"import torch, barnraise\nrun = barnraise.init()\n", "session"),
        (b"import torch, barnraise\ns = barnraise.optuna.storage()\n", "sweep"),
        (b"import torch\nfrom barnraise import optuna\ns = optuna.storage('a')\n", "sweep"),
        (b"import torch, optuna\ns = optuna.storage()\n", "separate"),
        (b"import torch, barnraise\nbarnraise.init(), barnraise.optuna.storage()\n", "session"),
        (b"import torch\nfrom barnraise import init\nrun = init(seed=1)\n", "session"),
        (b"import torch, barnraise\nprint(barnraise.__version__)\n", "separate"),
        (b"import torch\nimport torch.distributed as dist\ndist.init_process_group()\n", "distributed"),
        (b"import torch\ntorch.distributed.init_process_group('gloo')\n", "distributed"),
        (b"from torch.nn.parallel import DistributedDataParallel as DDP\n", "distributed"),
        (b"import torch, accelerate\n", "distributed"),
        (b"import torch\nfrom transformers import Trainer\n", "distributed"),
        (b"from barnraise.integrations.transformers import Trainer\n", "session"),
        (b"from barnraise.integrations.fabric import BarnraiseStrategy\nimport lightning\n", "session"),
        (b"import lightning as L\n", "distributed"),
        (b"from lightning_fabric import Fabric\n", "distributed"),
        (b"print('hello')\n", "unknown"),
        (b"def broken(:\n", "unknown"),
    ],
)
def test_script_text_gives_its_kind(text: bytes, kind: str) -> None:
    style = training_style({"train.py": text}, "train.py")
    assert style.kind == kind
    assert style.reason


def test_modules_of_the_folder_are_followed() -> None:
    files = {
        "train.py": b"import torch\nfrom parts import loop\nloop.train()\n",
        "parts/__init__.py": b"",
        "parts/loop.py": b"import barnraise\ndef train():\n    run = barnraise.init()\n",
        "other.py": b"import torch.distributed\n",
    }
    assert training_style(files, "train.py").kind == "session"
    assert training_style({**files, "parts/loop.py": b"def train(): ...\n"}, "train.py").kind == "separate"


def test_unreadable_module_of_the_folder_is_ignored() -> None:
    files = {"train.py": b"import torch, broken\n", "broken.py": b"def ("}
    assert training_style(files, "train.py").kind == "separate"


def test_examples_of_the_repository_need_no_option() -> None:
    for file in sorted((ROOT / "examples").glob("*.py")):
        kind = training_style({file.name: file.read_bytes()}, file.name).kind
        assert kind in ("session", "distributed", "sweep"), file


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b"from transformers import AutoModel, Trainer\n", "Trainer"),
        (b"from trl import SFTTrainer\n", "SFTTrainer"),
        (b"import torch\nfrom transformers import AutoModel\n", ""),
        (b"from mine import Trainer\n", ""),
    ],
)
def test_trainer_with_a_replacement_is_found(text: bytes, name: str) -> None:
    assert replaceable_trainer({"train.py": text}, "train.py") == (("train.py", name) if name else None)
