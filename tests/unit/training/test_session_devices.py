"""A session on an accelerator. A device of kind PrivateUse1 stands in, so that device code really runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fake_accelerator
from tests.repository import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        fake_accelerator.why_unavailable() is not None, reason=str(fake_accelerator.why_unavailable())
    ),
]

# Registering a device changes the whole process, so each training has one of its own.
PROGRAM = """\
import json, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
if sys.argv[1] != "cpu":
    from tests import fake_accelerator
    fake_accelerator.load(Path(sys.argv[1]))
import barnraise

run = barnraise.init(unit=4)
torch.manual_seed(0)
x = torch.randn(64, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=16, shuffle=True)
model, optimizer, batches = run.prepare(model, optimizer, loader)
kinds = set()
for epoch in run.epochs(3):
    for batch in batches:
        for inputs, targets in batch:
            kinds |= {inputs.device.type, targets.device.type}
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
run.save(sys.argv[2])
states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
print(json.dumps({
    "device": run.device.type,
    "batches": sorted(kinds),
    "parameters": sorted({parameter.device.type for parameter in model.parameters()}),
    "states": sorted({value.device.type for value in states}),
    "losses": [entry["loss"] for entry in run.history],
}))
"""


def train(folder: Path, device: str) -> tuple[dict[str, Any], bytes]:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    saved = folder / f"{Path(device).stem}.safetensors"
    done = subprocess.run(
        [sys.executable, str(script), device, str(saved)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), saved.read_bytes()


def test_session_uses_the_accelerator_without_a_line_in_the_script(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = fake_accelerator.build(tmp_path_factory.getbasetemp() / "fake")
    there, model = train(tmp_path, str(library))
    here, expected = train(tmp_path, "cpu")
    for name in ("batches", "parameters", "states"):
        assert there[name] == ["fake"], name
        assert here[name] == ["cpu"], name
    assert (there["device"], here["device"]) == ("fake", "cpu")
    assert there["losses"] == here["losses"], "the processor computes for both"
    assert model == expected
