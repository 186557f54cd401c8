from __future__ import annotations

import pytest

from barnraise.agent_client.run_options import ScriptImports
from barnraise.environments.compatibility import (
    CompatibilityFinding,
    ExcludedMachine,
    compare,
    describe,
    select_machines,
)
from barnraise.environments.installed_packages import InstalledPackages, Package


def machine(
    *,
    python: str = "3.11.7",
    torch: str | None = "2.13.0",
    os: str = "Linux",
    arch: str = "x86_64",
    **have: str,
) -> InstalledPackages:
    return InstalledPackages(
        python=python,
        implementation="CPython",
        os=os,
        arch=arch,
        executable="/opt/by/bin/python",
        torch=torch,
        packages=tuple(Package(name, name, version) for name, version in have.items()),
    )


def compared(
    here: InstalledPackages,
    pc: InstalledPackages,
    *required: str,
    optional: tuple[str, ...] = (),
    built_from: str | None = None,
) -> list[CompatibilityFinding]:
    needs = ScriptImports(required=required, optional=optional)
    return list(compare(here, {"pc": pc}, needs, {"pc": ("cpu",)}, built_from=built_from))


def only(findings: list[CompatibilityFinding]) -> CompatibilityFinding:
    assert len(findings) == 1, findings
    return findings[0]


def test_equal_machines_have_no_findings_and_one_line() -> None:
    findings = compared(machine(numpy="2.1"), machine(numpy="2.1"), "torch", "numpy")
    assert findings == []
    assert describe(findings) == ["Every machine has what the script needs."]


def test_small_differences_are_fine_and_still_one_line() -> None:
    findings = compared(
        machine(numpy="2.1", torch="2.13.0+cpu"), machine(numpy="2.4", torch="2.13.1+cu130"), "torch", "numpy"
    )
    assert [each.level for each in findings] == ["fine", "fine"]
    assert describe(findings) == ["Every machine has what the script needs (2 small differences)."]


def test_different_python_is_risky_and_named() -> None:
    finding = only(compared(machine(), machine(python="3.13.1")))
    assert (finding.level, finding.node) == ("risky", "pc")
    assert finding.sentence == "pc runs Python 3.13, and here it is Python 3.11."
    assert compared(machine(), machine(python="3.11.9")) == []


@pytest.mark.parametrize(
    ("os", "arch", "kinds", "end"),
    [
        (
            "Linux",
            "x86_64",
            ("cpu", "cuda"),
            "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130",
        ),
        ("Windows", "AMD64", ("cpu",), "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"),
        ("Darwin", "arm64", ("cpu", "mps"), "torch==2.13.0"),
    ],
)
def test_different_torch_is_impossible_with_the_exact_command(
    os: str, arch: str, kinds: tuple[str, ...], end: str
) -> None:
    pc = machine(torch="2.12.1", os=os, arch=arch)
    here = machine(torch="2.13.0+cpu")
    (finding,) = compare(here, {"pc": pc}, ScriptImports(required=("torch",)), {"pc": kinds})
    assert finding.level == "impossible"
    assert "2.12.1" in finding.sentence
    assert f"On pc run `/opt/by/bin/python -m pip install {end}`" in finding.fix
    assert "--env sync" in finding.fix
    # A script that does not import torch may still do it through another package.
    (finding,) = compare(here, {"pc": pc}, ScriptImports(), {"pc": kinds})
    assert finding.level == "risky"


def test_torch_is_compared_between_the_others_if_it_is_missing_here() -> None:
    others = {"a": machine(torch="2.13.0"), "b": machine(torch="2.12.0")}
    (finding,) = compare(machine(torch=None), others, ScriptImports(required=("torch",)), {})
    assert finding.sentence == "b has torch 2.12.0, and on a it is 2.13.0: they cannot train in one group."


def test_missing_torch_is_impossible_or_risky() -> None:
    finding = only(compared(machine(), machine(torch=None), "torch"))
    assert finding.level == "impossible"
    assert "`barnraise torch --install`" in finding.fix
    assert only(compared(machine(), machine(torch=None), optional=("torch",))).level == "risky"
    assert compared(machine(), machine(torch=None)) == []
    old_mac = machine(torch=None, os="Darwin", arch="x86_64")
    assert "Leave pc out with `--on`" in only(compared(machine(), old_mac, "torch")).fix


def test_missing_package_names_machine_and_version() -> None:
    here = InstalledPackages(
        python="3.11.7",
        implementation="CPython",
        os="Linux",
        arch="x86_64",
        packages=(Package("sklearn", "scikit-learn", "1.5.2"),),
    )
    finding = only(compared(here, machine(), "sklearn"))
    assert (finding.level, finding.node) == ("impossible", "pc")
    assert "On pc run `/opt/by/bin/python -m pip install scikit-learn==1.5.2`" in finding.fix
    finding = only(compared(here, machine(), "sklearn", built_from="requirements.txt"))
    assert finding.fix == "Add `scikit-learn==1.5.2` to what requirements.txt is made from, and run again."


def test_package_only_on_others_is_named_with_its_version() -> None:
    others = {"here": machine(), "pc": machine(timm="1.0.1")}
    (finding,) = compare(machine(), others, ScriptImports(required=("timm",)), {})
    assert finding.node == "here"
    assert "timm==1.0.1" in finding.fix


def test_package_missing_everywhere_is_reported_once() -> None:
    others = {name: machine() for name in ("a", "b", "c")}
    (finding,) = compare(machine(), others, ScriptImports(required=("timm",)), {})
    assert (finding.level, finding.node) == ("impossible", "")
    assert "pip install timm`" in finding.fix
    (finding,) = compare(machine(), others, ScriptImports(optional=("timm",)), {})
    assert finding.level == "fine"


def test_versions_and_optional_packages() -> None:
    assert only(compared(machine(numpy="2.1"), machine(numpy="1.26"), "numpy")).level == "risky"
    assert only(compared(machine(wandb="1"), machine(), optional=("wandb",))).level == "risky"
    assert compared(machine(odd="unknown"), machine(odd="unknown"), "odd") == []


def test_texts_of_a_peer_do_not_become_commands() -> None:
    evil = machine(timm="1;rm -rf ~")
    evil = InstalledPackages(
        python="3", implementation="CPython", os="Linux", arch="x", packages=evil.packages, torch="2.13.0"
    )
    victim = InstalledPackages(
        python="3", implementation="CPython", os="L", arch="x", executable="`reboot`\n"
    )
    findings = compare(victim, {"evil": evil, "victim": victim}, ScriptImports(required=("timm",)), {})
    (fix,) = [each.fix for each in findings if each.node == "victim"]
    assert fix.startswith("On victim run `python -m pip install timm`, or put ")


def test_texts_of_a_peer_do_not_move_the_cursor() -> None:
    lines = describe(compared(machine(), machine(torch="1.0\x1b[2J"), "torch"))
    assert all(line.isprintable() for line in lines)


def test_machines_without_cuda_are_left_out_and_named() -> None:
    needs = ScriptImports(required=("numpy",), cuda="train.py line 3 asks for CUDA: x.cuda()")
    others = {"mac": machine(os="Darwin", arch="arm64"), "pc": machine(numpy="2")}
    devices = {"mac": ("cpu", "mps"), "pc": ("cpu", "cuda")}
    findings = compare(machine(numpy="2"), others, needs, devices)
    verdict = select_machines(findings, ["mac", "pc"])
    assert verdict.kept == ("pc",)
    (mac,) = verdict.left_out
    assert isinstance(mac, ExcludedMachine)
    assert mac.why.startswith("mac has no CUDA device and is left out: train.py line 3 asks for CUDA")
    assert "let the script choose" in mac.why, "not that numpy is missing, which would not help"
    # A package that is missing on an excluded machine does not block the start.
    assert verdict.blocking == ()


@pytest.mark.parametrize(
    ("pc", "reason", "fix"),
    [
        (machine(), "numpy is missing on pc", "pip install numpy==2"),
        (machine(numpy="2", torch=None), "pc has no torch", "barnraise torch"),
        (machine(numpy="2", torch="1.0"), "they cannot train in one group", "install torch=="),
    ],
)
def test_machine_that_lacks_something_is_left_out_with_the_fix(
    pc: InstalledPackages, reason: str, fix: str
) -> None:
    findings = compared(machine(numpy="2"), pc, "numpy", "torch")
    verdict = select_machines(findings, ["mac", "pc"])
    assert verdict.kept == ("mac",)
    assert verdict.blocking == ()
    (left_out,) = verdict.left_out
    assert reason in left_out.why
    assert fix in left_out.why


def test_package_that_no_machine_has_blocks_the_start() -> None:
    findings = compared(machine(), machine(), "numpy")
    verdict = select_machines(findings, ["mac", "pc"])
    assert [each.sentence for each in verdict.blocking] == [findings[0].sentence]
    assert verdict.left_out == ()


def test_syntax_error_is_the_only_finding() -> None:
    findings = compare(
        machine(), {"pc": machine(torch=None)}, ScriptImports(syntax="train.py line 3: invalid"), {}
    )
    assert [each.about for each in findings] == ["code"]
    assert select_machines(findings, ["pc"]).blocking == findings


def test_lines_have_the_worst_finding_first() -> None:
    pc = machine(python="3.12.0", numpy="1.26")
    lines = describe(compared(machine(numpy="2.1", timm="1.0"), pc, "numpy", "timm"))
    assert [line.split()[0] for line in lines] == ["impossible", "->", "risky", "->", "risky", "->"]
    assert "timm is missing on pc, and the script imports it." in lines[0]
