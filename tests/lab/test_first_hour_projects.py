"""Projects of a new user after the first ten minutes, typed at terminals of three machines, in that order."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator

import pytest

from benchmarks.agents.runs import PAIRING_CODE
from benchmarks.newcomer.five_runs import PLAIN
from lab import Lab
from tests.lab.typed_machines import TypedMachine, TypedMachines, run_name
from tests.repository import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = ROOT / "tests" / "numerics" / "scripts"
SPIRAL = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")
BIG_BYTES = 300 << 20


@pytest.fixture(scope="module")
def machines() -> Iterator[TypedMachines]:
    """Three paired machines; a fourth without torch and a fifth are not in the cluster."""
    names = ("mac", "pc", "nas", "box", "laptop")
    with Lab(hosts=len(names)) as lab, TypedMachines(lab, names, without_torch="box") as machines:
        machines.pair(machines.all[0], machines.all[1:3])
        yield machines


@pytest.fixture
def mac(machines: TypedMachines) -> TypedMachine:
    return machines.all[0]


@pytest.fixture
def pc(machines: TypedMachines) -> TypedMachine:
    return machines.all[1]


def _session(each_epoch: str = "pass", epochs: str = "3") -> str:
    """Return the README's script with other epochs, and lines that every machine runs at the end of each."""
    assert "epochs(16)" in SPIRAL
    assert SPIRAL.count("\nrun.save") == 1
    lines = "".join(f"    {line}\n" for line in each_epoch.splitlines())
    text = SPIRAL.replace("epochs(16)", f"epochs({epochs})").replace("\nrun.save", f"\n{lines}run.save")
    return "import os\n" + text


def test_plain_script_is_refused_and_runs_separately_if_asked(mac: TypedMachine) -> None:
    mac.write(PLAIN)
    refused = mac.type("barnraise run train.py", code=1)
    assert "nothing was started" in refused
    assert "--separate" in refused
    assert "+for epoch in run.epochs(3):" in refused
    separate = mac.type("barnraise run --separate --all train.py")
    for name in ("mac", "pc", "nas"):
        assert len(re.findall(rf"^{name}:\d epoch 2 ", separate, re.MULTILINE)) == 1, separate


def test_prints_of_every_machine_are_not_replayed(mac: TypedMachine) -> None:
    mac.write(_session("print('the end of epoch', epoch)"))
    printed = mac.type("barnraise run train.py")
    assert re.findall(r"the end of epoch (\d)", printed) == ["0", "1", "2"], printed
    assert "disappeared" not in printed
    assert "restart" not in printed
    assert "finished successfully" in printed


def test_options_after_script_go_to_script_with_a_warning(mac: TypedMachine) -> None:
    parser = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs', type=int)\n"
    )
    mac.write(parser + "options = parser.parse_args()\n" + _session(epochs="options.epochs"))
    trained = mac.type("barnraise run train.py --epochs 1")
    assert "epoch 0 " in trained
    assert "epoch 1 " not in trained
    misplaced = mac.type("barnraise run train.py --epochs 1 --on pc", code=2)
    assert "--on comes after train.py" in misplaced.replace("\n", " ")
    assert "unrecognized arguments: --on pc" in misplaced
    mistyped = mac.type("barnraise run --on pcc train.py --epochs 1", code=1)
    assert re.search(r"[Dd]id you mean pc", mistyped), mistyped


def test_undo_lines_undo_exactly_what_was_done(machines: TypedMachines, mac: TypedMachine) -> None:
    laptop = machines.all[4]
    (joined,) = machines.pair(mac, [laptop])
    undo = re.search(r"^Undo: (barnraise .+)$", joined, re.MULTILINE)
    assert undo is not None, joined
    leaving = laptop.open(undo[1])
    laptop.until(leaving, r"\[y/N\]")
    laptop.terminal.press("y\n")
    assert "barnraise unpair laptop" in laptop.ended(leaving, 0), "what is left to do elsewhere"
    mac.type("barnraise unpair laptop --yes")
    machines.until_online(mac, 3)
    machines.pair(mac, [laptop])
    undo = re.search(r"^Undo: (barnraise .+)$", mac.terminal.commands[-1].output, re.MULTILINE)
    assert undo is not None
    removing = mac.open(undo[1])
    mac.until(removing, r"\[y/N\]")
    mac.terminal.press("y\n")
    mac.ended(removing, 0)
    machines.until_online(mac, 3)
    laptop.type("barnraise leave --yes")


def test_error_on_one_machine_is_readable_afterwards_everywhere(
    machines: TypedMachines, mac: TypedMachine
) -> None:
    mark = mac.home / "crashed"
    crash = (
        f"if epoch == 1 and os.environ['RANK'] == '1' and not os.path.exists('{mark}'):\n"
        f"    open('{mark}', 'w').close()\n"
        "    raise ValueError('no such label')\n"
        "print('the end of epoch', epoch, 'on rank', os.environ['RANK'])"
    )
    mac.write(_session(crash, epochs="8"))
    printed = mac.type("barnraise run train.py", code=None)
    assert mark.exists(), printed
    assert mac.terminal.commands[-1].code == 3, printed
    failed = re.search(r"barnraise: (\w+): ValueError: no such label \(train\.py:\d+\)", printed)
    assert failed is not None, printed
    for machine in machines.all[:3]:
        shown = machine.type(f"barnraise ps {run_name(printed)}")
        assert "ValueError: no such label" in shown
        logs = machine.type(f"barnraise logs {run_name(printed)} --all")
        assert "raise ValueError" in logs, "the traceback"
        for name in ("mac", "pc", "nas"):
            lines = re.findall(rf"^{name}\S* the end of epoch 7", logs, re.MULTILINE)
            assert len(lines) == 1, f"{name} is labelled, each line once:\n{logs}"


def test_error_on_all_machines_is_shown_once_and_named_last(mac: TypedMachine, pc: TypedMachine) -> None:
    mac.write(SPIRAL.replace("nn.Linear(64, 2)", "nn.Linear(63, 2)"))
    printed = mac.type("barnraise run train.py", code=1)
    assert printed.count("Traceback") == 1, printed
    last = "\n".join(printed.splitlines()[-6:])
    assert re.search(r"RuntimeError: mat1 and mat2", last), printed
    assert re.search(r"train\.py:\d+", last), printed
    # The first failure stops the others, which may not have failed yet.
    assert re.search(r", on (all 3 machines|\w+)", last.replace("\n", " ")), printed
    assert "RuntimeError" in pc.type(f"barnraise ps {run_name(printed)}")


def test_data_outside_the_folder_needs_an_option(mac: TypedMachine) -> None:
    count = "import glob, os\nprint('files', len(glob.glob({place} + '/*.txt')))\nopen({place} + '/0.txt')\n"
    data = mac.home / "photos"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.txt").write_text("a photo")
    mac.write(count.format(place="os.path.expanduser('~/photos')"))
    missing = mac.type("barnraise run train.py", code=1)
    assert "FileNotFoundError" in missing
    assert "--data photos=" in missing, "how the others get it"
    mac.write(count.format(place="os.environ['BARNRAISE_DATA_PHOTOS']"))
    assert "files 3" in mac.type("barnraise run --data photos=../photos train.py")
    mac.write(count.format(place="'photos'"))
    shutil.copytree(data, mac.folder / "photos")
    assert "files 3" in mac.type("barnraise run train.py"), "inside it needs nothing"


def test_large_file_is_sent_once(mac: TypedMachine) -> None:
    mac.write("import os\nprint('bytes', os.path.getsize('weights.bin'))\n")
    with (mac.folder / "weights.bin").open("wb") as file:
        for _ in range(BIG_BYTES >> 20):
            file.write(os.urandom(1 << 20))
    first = mac.type("barnraise run train.py")
    assert f"bytes {BIG_BYTES}" in first
    second = mac.type("barnraise run train.py")
    assert f"bytes {BIG_BYTES}" in second
    assert "receives" not in second, "nothing is sent again"


@pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="tqdm is not installed")
def test_tqdm_shows_its_bar_while_it_runs(mac: TypedMachine) -> None:
    assert SPIRAL.count(" in batches:") == 1
    text = _session(epochs="4").replace(" in batches:", " in tqdm(batches):")
    mac.write("from tqdm import tqdm\n" + text)
    training = mac.open("barnraise run train.py")
    mac.until(training, r"\d+/64 ")
    assert training.code is None, "it still runs"
    printed = mac.ended(training, 0)
    assert re.search(r"100%.* 64/64 ", printed), printed


@pytest.mark.parametrize("script", ["ddp_training.py", "accelerate_training.py"])
def test_programs_of_torch_distributed_run_unmodified(mac: TypedMachine, script: str) -> None:
    if script.startswith("accelerate") and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    mac.write((SCRIPTS / script).read_text(encoding="utf-8"))
    state = f" --state {mac.home / 'state'}" if script.startswith("accelerate") else ""
    printed = mac.type(f"barnraise run train.py{state}")
    assert "loss" in printed
    assert "finished successfully" in printed


def test_requirements_file_is_built_only_if_the_person_agrees(mac: TypedMachine) -> None:
    mac.write("print('it ran')\n")
    (mac.folder / "requirements.txt").write_text("torch\n")
    running = mac.open("barnraise run train.py")
    mac.until(running, r"requirements\.txt on 3 machines\? \[Y/n\]")
    mac.terminal.press("n\n")
    printed = mac.ended(running, 0)
    assert "it ran" in printed
    assert "--env agent" in printed, "how to be asked no more"
    assert "requirements.txt" not in mac.type("barnraise run --env agent train.py")


def test_second_machine_called_pc_gets_another_name(
    machines: TypedMachines, mac: TypedMachine, pc: TypedMachine
) -> None:
    other = machines.all[4]
    other.host.host_name = "pc"
    other.new_terminal()
    (joined,) = machines.pair(mac, [other])
    names = re.search(r"pc and (pc-\w{4}) \(this machine\)", joined)
    assert names is not None, joined
    assert names[1] in pc.type("barnraise status"), "the old pc knows the new name"
    assert f"Undo: barnraise unpair {names[1]}" in mac.terminal.commands[-1].output
    mac.type(f"barnraise unpair {names[1]} --yes")
    machines.until_online(mac, 3)
    other.type("barnraise leave --yes", code=None)


def test_machine_without_torch_is_left_out(machines: TypedMachines, mac: TypedMachine) -> None:
    box = machines.all[3]
    pairing = mac.open("barnraise pair")
    mac.until(pairing, "expires")
    joining = box.open(f"barnraise join {PAIRING_CODE.findall(pairing.output)[-1]}")
    box.until(joining, r"Install torch now\? \[Y/n\]")
    box.terminal.press("n\n")
    assert "barnraise torch --install" in box.ended(joining, 0)
    mac.ended(pairing, 0)
    machines.until_online(mac, 4)
    mac.write(_session())
    printed = mac.type("barnraise run train.py")
    assert re.search(r"box takes no part: .*torch", printed), printed
    assert "3 workers on 3 machines" in printed
    mac.type("barnraise unpair box --yes")
    machines.until_online(mac, 3)


def test_script_that_asks_ends_with_its_error(mac: TypedMachine) -> None:
    mac.write("name = input('Your name? ')\nprint(name)\n")
    printed = mac.type("barnraise run train.py", code=1)
    assert "EOFError" in printed
    assert "no keyboard" in printed, "why, and what to do"


def test_run_goes_on_without_the_window_that_started_it(mac: TypedMachine, pc: TypedMachine) -> None:
    mac.write(_session(epochs="400"))
    training = mac.open("barnraise run train.py")
    mac.until(training, "epoch 0 ")
    run = run_name(training.output)
    mac.new_terminal()
    assert re.search(rf"{run}\s+running", pc.type("barnraise ps"))
    attached = mac.open("barnraise attach")
    mac.until(attached, r"epoch \d+ ")
    mac.terminal.press("\x03")
    assert "continues" in mac.ended(attached, 0)
    assert run in pc.type("barnraise stop"), "without a name: the newest"
    assert "epoch 0 " in mac.type("barnraise logs"), "without a name: the newest"


@pytest.mark.parametrize("line", ["barnraise -h", "barnraise help", "barnraise run -h", "barnraise"])
def test_help_is_found_where_people_look_for_it(mac: TypedMachine, line: str) -> None:
    printed = mac.type(line)
    assert "Usage: barnraise" in printed


def test_version_and_mistyped_commands_are_answered(mac: TypedMachine) -> None:
    assert re.search(r"barnraise \d+\.\d+", mac.type("barnraise version"))
    assert "status" in mac.type("barnraise statsu", code=2)
