"""Hint about a Trainer that trains outside a session."""

from __future__ import annotations

import pytest

from barnraise.cli.runs.adapt import warn_of_plain_trainer

PLAIN = b"from transformers import Trainer\n"
OURS = (
    b"from barnraise.integrations.transformers import Trainer\nfrom transformers import TrainingArguments\n"
)


@pytest.mark.parametrize(("text", "is_told"), [(PLAIN, True), (OURS, False), (b"import torch\n", False)])
def test_plain_trainer_is_told_of_its_replacement(
    text: bytes, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_plain_trainer({"train.py": text}, ["train.py", "--epochs", "3"])
    line = "from barnraise.integrations.transformers import Trainer"
    assert (line in capsys.readouterr().err) == is_told
