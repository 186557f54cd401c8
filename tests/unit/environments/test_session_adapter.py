"""Ordinary training scripts become sessions: the changed script runs, and another form is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from barnraise.core.errors import RunError
from barnraise.environments.session_adapter import adapt_script, unified_diff
from barnraise.environments.training_style import training_style
from tests.repository import ROOT

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 4)
y = (x.sum(1) > 0).long()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
"""
NOTE = "  # this machine's part; step() takes effect after it"
LOOP = """\
for epoch in range(4):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
torch.save(model.state_dict(), "model.pt")
"""
IN_FUNCTIONS = '''\
"""A script of the usual form."""
import argparse

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % 10 == 0:
            print("epoch", epoch, "loss", loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    run = "the name is taken"
    x = torch.randn(256, 4)
    train_loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, net, train_loader, optimizer, epoch)
        scheduler.step()
        print(f"epoch {epoch} is over", run)
    torch.save(net.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
'''


def _run(text: str, folder: Path) -> str:
    (folder / "train.py").write_text(text, encoding="utf-8")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "src"))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _applied(before: str, diff: str, folder: Path) -> str:
    (folder / "train.py").write_text(before, encoding="utf-8")
    subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, check=True)
    return (folder / "train.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("text", [HEAD + LOOP, IN_FUNCTIONS], ids=["top level", "functions"])
def test_adapted_script_trains_in_a_session(text: str, tmp_path: Path) -> None:
    adapted = adapt_script(text)
    assert training_style({"train.py": adapted.text.encode()}, "train.py").kind == "session"
    output = _run(adapted.text, tmp_path)
    assert len([line for line in output.splitlines() if line.startswith("epoch")]) >= 3, output
    assert (tmp_path / "model.pt").stat().st_size > 0


def test_adapted_script_differs_in_few_lines(tmp_path: Path) -> None:
    adapted = adapt_script(HEAD + LOOP)
    assert "for epoch in run.epochs(4):" in adapted.text
    assert (
        f"    for batch in loader:\n        for a, b in batch:{NOTE}\n            optimizer.zero_grad()\n"
        in adapted.text
    )
    assert "model, optimizer, loader = run.prepare(model, optimizer, loader)" in adapted.text
    assert "    run.print(f" in adapted.text
    assert 'if run.is_main:\n    torch.save(model.state_dict(), "model.pt")\n' in adapted.text
    diff = unified_diff(HEAD + LOOP, adapted.text, "train.py")
    before = {line.strip() for line in (HEAD + LOOP).splitlines()}
    changed = [line for line in adapted.text.splitlines() if line.strip() not in before]
    assert len(changed) == 8, "five new lines and three changed ones, besides the indentation"
    assert _applied(HEAD + LOOP, diff, tmp_path) == adapted.text


def test_names_in_functions_are_those_of_the_caller() -> None:
    adapted = adapt_script(IN_FUNCTIONS)
    assert "session = barnraise.init()" in adapted.text, "run is taken"
    assert "net, optimizer, train_loader = session.prepare(net, optimizer, train_loader)" in adapted.text
    assert "for epoch in (1 + epoch for epoch in session.epochs(args.epochs)):" in adapted.text
    assert any("every machine" in note for note in adapted.notes)


def test_report_by_number_of_batch_stays_in_loop_over_steps() -> None:
    adapted = adapt_script(IN_FUNCTIONS).text
    assert "    for batch, (data, target)" not in adapted
    assert "    for batch, step_batch in enumerate(train_loader):\n" in adapted
    assert f"        for data, target in step_batch:{NOTE}\n" in adapted
    assert "                optimizer.zero_grad()\n" not in adapted
    assert "            optimizer.step()\n        if batch % 10 == 0:\n            print(" in adapted


def test_sums_in_the_loop_are_pointed_out_and_long_texts_kept() -> None:
    summed = LOOP.replace("optimizer.step()\n", 'optimizer.step()\n        total += """a\nb"""\n')
    adapted = adapt_script(HEAD + summed)
    assert any("total +=" in note for note in adapted.notes)
    assert '            total += """a\nb"""\n    run.print' in adapted.text


def test_scheduler_is_prepared_if_it_moves_with_batches_and_tracked_if_with_epochs() -> None:
    made = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
    stepped = LOOP.replace("optimizer.step()\n", "optimizer.step()\n        scheduler.step()\n")
    per_batch = adapt_script(HEAD + made + stepped).text
    assert "loader, scheduler = run.prepare(model, optimizer, loader, scheduler)" in per_batch
    assert "run.track" not in per_batch
    per_epoch = adapt_script(IN_FUNCTIONS).text
    assert 'session.track("scheduler", scheduler)\n' in per_epoch


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('hello')\n", "no `for` loop"),
        ("def broken(:\n", "line 1"),
        (HEAD + LOOP.replace("range(4)", "range(4, 0, -1)"), "count up"),
        (HEAD + LOOP.replace("in loader", "in DataLoader(1)"), "not over a DataLoader in a variable"),
        (HEAD + LOOP + LOOP, "several training loops"),
        (HEAD + LOOP.replace("optimizer.step()", "if epoch: optimizer.step()"), "for each batch"),
        (HEAD.replace("optimizer =", "optimizer, rest =") + LOOP, "torch.optim.NAME"),
        (HEAD + LOOP.replace("for epoch in range(4):", "while True:"), "no `for epoch in range"),
        (HEAD + LOOP.replace("range(4)", "range(\n    4)"), "several lines"),
    ],
)
def test_script_of_another_form_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(RunError, match=reason):
        adapt_script(text)
