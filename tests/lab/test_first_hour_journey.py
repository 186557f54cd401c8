"""Everything that a new user types in the first hour, at terminals of three machines, in that order."""

from __future__ import annotations

import re

import pytest

from benchmarks.agents.runs import PAIRING_CODE
from lab import Lab
from tests.lab.typed_machines import TypedMachine, TypedMachines, is_narrow, run_name
from tests.repository import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("mac", "pc", "nas")
SPIRAL = (ROOT / "examples" / "train.py").read_text(encoding="utf-8")


def test_first_ten_minutes_are_as_promised() -> None:
    with Lab(hosts=3) as lab, TypedMachines(lab, NAMES) as machines:
        mac, pc, nas = machines.all
        _start_agents(machines)
        _pair_with_mistakes(mac, pc)
        machines.pair(mac, [nas])
        machines.until_online(mac, 3)
        _look(mac)
        run = _pull_plug(lab, mac, nas)
        _control_from_pc(mac, pc, run)
        resumed = _resume_and_export(mac, pc, run)
        _nas_returns(machines, nas, resumed)
        _interrupt(mac, pc)


def _start_agents(machines: TypedMachines) -> None:
    for machine in machines.all:
        started = machine.type("barnraise up --detach")
        assert "barnraise pair" in started, "what comes next"
    again = machines.all[0].type("barnraise up --detach", code=1)
    assert "already" in again


def _pair_with_mistakes(mac: TypedMachine, pc: TypedMachine) -> None:
    """Mistype the code: a word that does not exist costs nothing, swapped words use it up."""
    pairing = mac.open("barnraise pair")
    mac.until(pairing, "expires")
    code = PAIRING_CODE.findall(pairing.output)[-1]
    number, first, second, third = code.split("-")
    unknown = pc.type(f"barnraise join {number}-xyzzy-{second}-{third}", code=1)
    assert "xyzzy" in unknown
    assert pairing.code is None, "the code is still open"
    swapped = pc.type(f"barnraise join {number}-{second}-{third}-{first}", code=1)
    assert "code" in swapped
    refused = mac.ended(pairing, 1)
    assert "used up" in refused
    assert "barnraise pair" in refused, "what to do"
    pairing = mac.open("barnraise pair")
    mac.until(pairing, "expires")
    joined = pc.type(f"barnraise join {PAIRING_CODE.findall(pairing.output)[-1]}")
    assert "mac" in joined
    assert "Undo: barnraise leave" in joined
    offered = mac.ended(pairing, 0)
    assert "Undo: barnraise unpair pc" in offered
    assert is_narrow(joined)
    assert is_narrow(offered)


def _look(mac: TypedMachine) -> None:
    status = mac.type("barnraise status")
    assert all(name in status for name in NAMES)
    assert is_narrow(status), status
    doctor = mac.type("barnraise doctor", code=None)
    assert re.search(r"\d+ checks? passed", doctor), doctor
    assert is_narrow(re.sub(r"^ +-> .*", "", doctor, flags=re.MULTILINE)), doctor
    assert len(doctor.splitlines()) < 25, "only what needs attention"


def _pull_plug(lab: Lab, mac: TypedMachine, nas: TypedMachine) -> str:
    """Train on three machines, one of which loses its power."""
    mac.write(SPIRAL)
    view = mac.open("barnraise run train.py")
    mac.until(view, r"epoch 2 .*machines 3")
    for other in lab.hosts[:2]:
        lab.cut(other, nas.host)
    nas.host.kill_all()
    mac.until(view, "nas disappeared; training continues on 2 machines")
    mac.until(view, r"epoch \d+ .*machines 2")
    return run_name(view.output)


def _control_from_pc(mac: TypedMachine, pc: TypedMachine, run: str) -> None:
    view = mac.terminal.commands[-1]
    listed = pc.type("barnraise ps")
    assert re.search(rf"{run} .*running", listed), listed
    assert is_narrow(listed), listed
    shown = pc.type(f"barnraise ps {run}")
    assert "nas" in shown, "that it disappeared"
    assert re.search(r"step \d+", shown), shown
    assert is_narrow(shown), shown
    logs = pc.type(f"barnraise logs {run}")
    assert "epoch 0" in logs
    assert "machines 2" in logs
    assert run in pc.type(f"barnraise stop {run}")
    stopped = mac.ended(view, 130)
    assert "stopped from pc" in stopped


def _resume_and_export(mac: TypedMachine, pc: TypedMachine, run: str) -> str:
    printed = mac.type(f"barnraise resume {run}")
    resumed = run_name(printed)
    assert resumed != run
    assert "finished successfully" in printed
    assert "disappeared" not in printed, "machines that finish do not disappear"
    epochs = [int(number) for number in re.findall(r"epoch (\d+) ", printed)]
    assert epochs == list(range(epochs[0], 16)), "each epoch once, to the end"
    assert (mac.folder / "barnraise-runs" / resumed / "model.safetensors").exists()
    assert "spiral-model" in mac.type(f"barnraise export {resumed} spiral-model")
    assert (mac.folder / "spiral-model" / "model.safetensors").exists()
    afterwards = pc.type(f"barnraise logs {resumed} --all")
    assert "epoch 15" in afterwards, "from another machine, after the end"
    return resumed


def _nas_returns(machines: TypedMachines, nas: TypedMachine, resumed: str) -> None:
    machines.lab.heal_all()
    nas.new_terminal()
    returned = nas.type("barnraise up --detach")
    assert "one of 3 paired machines" in returned
    machines.until_online(nas, 3)
    listed = nas.type("barnraise ps --all")
    assert resumed in listed, "a run that it missed"
    assert "epoch 15" in nas.type(f"barnraise logs {resumed} --all")


def _interrupt(mac: TypedMachine, pc: TypedMachine) -> None:
    view = mac.open("barnraise run train.py")
    mac.until(view, "epoch 0 ")
    mac.terminal.press("\x03")
    stopped = mac.ended(view, 130)
    assert "Ctrl-C again" in stopped
    assert re.search(r"stopped", pc.type("barnraise ps")), "pc knows it, too"
