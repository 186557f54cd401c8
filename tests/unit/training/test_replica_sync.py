"""Wrong use of `sync_replicas`. What it does is tested on real ranks: tests/numerics/test_training.py."""

from __future__ import annotations

import pytest
import torch

from barnraise.core.errors import RunError
from barnraise.training.replica_sync import sync_replicas


def test_wrong_use_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RunError, match="needs an optimizer"):
        sync_replicas(model)
    with pytest.raises(RunError, match="every 0 steps"):
        sync_replicas(model, torch.optim.SGD(model.parameters(), lr=0.1), every=0)
