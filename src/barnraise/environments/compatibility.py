"""Compatibility check: compare the machines' packages with the imports of the script. Pure.

The reference is the machine that starts the run ("here"). The other machines should have what it has.

Findings, as a table::

    ======================================  ==========  ==================================================
    what differs                            verdict     why
    ======================================  ==========  ==================================================
    the script cannot be parsed             impossible  reported once
    torch, in its first two numbers         impossible  a group across both would disagree about the
                                                        wire; risky if the script does not import torch
    torch, later numbers or ``+cpu``        fine        the same interface and the same mathematics
    torch missing, and required             impossible  ``barnraise torch --install``; risky if optional
    a required package missing on one       impossible  the fix names the version that works elsewhere
    a required package missing everywhere   impossible  reported once, not per machine
    an optional package missing on one      risky       the script may behave differently there
    an optional package missing everywhere  fine        it behaves the same, and is prepared for it
    a package's first number                risky       interfaces change there
    a package's later numbers               fine
    Python's first two numbers              risky       most scripts work; what they exchange may not
    CUDA demanded, no such device           impossible  the machine is left out, and named
    ======================================  ==========  ==================================================

A machine with an impossible finding is left out if the others suffice. If environments were built from a file
of the folder, the fixes name that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from barnraise.agent_client.run_options import ScriptImports
from barnraise.core.sanitize import is_printable, printable
from barnraise.environments.installed_packages import InstalledPackages, Package
from barnraise.environments.torch_build import choose_torch

Level = Literal["fine", "risky", "impossible"]
About = Literal["code", "python", "torch", "package", "device"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_BREAKS_A_COMMAND = frozenset("\"'`$;&|<>\n")
_OR_SYNC = ", or put a requirements.txt into the folder and use `--env sync`."
_WORST_FIRST: tuple[Level, ...] = ("impossible", "risky", "fine")


class CompatibilityFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between machines; an empty ``node`` means every machine."""

    level: Level
    about: About
    sentence: str
    fix: str = ""
    node: str = ""


class ExcludedMachine(msgspec.Struct, frozen=True):
    """Machine that cannot take part, and the reason."""

    node: str
    why: str


class CompatibilityVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that can run the script, machines that are left out, and findings that block the start."""

    kept: tuple[str, ...]
    left_out: tuple[ExcludedMachine, ...]
    blocking: tuple[CompatibilityFinding, ...]


def compare(
    reference: InstalledPackages,
    others: Mapping[str, InstalledPackages],
    needs: ScriptImports,
    devices: Mapping[str, Sequence[str]],
    *,
    built_from: str | None = None,
) -> tuple[CompatibilityFinding, ...]:
    """Return every relevant difference, the worst first.

    ``others``: the machines that take part, including the reference if it is one of them. ``devices``: the
    device kinds of each machine. ``built_from``: the file if environments were built for the run.
    """
    if needs.syntax is not None:
        fix = "Correct it, then run again; `python -m py_compile` with the file's name checks it."
        return (CompatibilityFinding(level="impossible", about="code", sentence=f"{needs.syntax}.", fix=fix),)
    fixes = _Fixes(devices, built_from)
    findings: list[CompatibilityFinding] = []
    for node, packages in others.items():
        findings += _python(reference, node, packages)
        findings += _cuda(needs, node, devices)
    findings += _torch(reference, others, needs, fixes)
    for name in (*needs.required, *needs.optional):
        if name != "torch":
            findings += _package(name, name in needs.required, reference, others, fixes)
    return tuple(sorted(findings, key=lambda each: _WORST_FIRST.index(each.level)))


def select_machines(findings: Sequence[CompatibilityFinding], nodes: Sequence[str]) -> CompatibilityVerdict:
    """Select the machines that can take part.

    A machine that lacks something is left out, with the fix. A finding about every machine blocks the start.
    """
    impossible = [each for each in findings if each.level == "impossible"]
    # A device cannot be installed, so that reason comes before a missing package.
    by_device = sorted(impossible, key=lambda each: each.about != "device")
    lacking = {each.node: each for each in reversed(by_device) if each.node}
    return CompatibilityVerdict(
        kept=tuple(node for node in nodes if node not in lacking),
        left_out=tuple(
            ExcludedMachine(node, f"{lacking[node].sentence} {lacking[node].fix}".strip())
            for node in nodes
            if node in lacking
        ),
        blocking=tuple(each for each in impossible if not each.node),
    )


def describe(findings: Sequence[CompatibilityFinding]) -> list[str]:
    """Return lines for the user: one line if all is fine, else each relevant difference with its fix."""
    shown = [each for level in _WORST_FIRST[:2] for each in findings if each.level == level]
    if not shown:
        small = len(findings)
        also = f" ({small} small difference{'s' if small > 1 else ''})" if small else ""
        return [f"Every machine has what the script needs{also}."]
    width = max(len(each.node or "everywhere") for each in shown)
    lines = []
    for each in shown:
        lines.append(f"{each.level:<10}  {each.node or 'everywhere':<{width}}  {each.sentence}")
        if each.fix:
            lines.append(f"{'':<10}  {'':<{width}}  -> {each.fix}")
    # Parts of the lines come from other machines.
    return [printable(line) for line in lines]


class _Fixes(msgspec.Struct, frozen=True):
    """Commands and actions that resolve a finding."""

    devices: Mapping[str, Sequence[str]]
    built_from: str | None

    def install(self, node: str, packages: InstalledPackages | None, name: str, known: Package | None) -> str:
        """Return how to install a package in a version that works on another machine."""
        # Another machine's word becomes part of a command: nothing but a name and a version may pass.
        wanted = name
        if known is not None and known.distribution and _NAME.fullmatch(known.distribution):
            wanted = known.distribution
        if known is not None and known.version and _NAME.fullmatch(known.version):
            wanted = f"{wanted}=={known.version}"
        if self.built_from is not None:
            return f"Add `{wanted}` to what {self.built_from} is made from, and run again."
        where = f"On {node}" if node else "On each machine"
        return f"{where} run `{_pip(packages)} install {wanted}`{_OR_SYNC}"

    def torch(self, node: str, packages: InstalledPackages, version: str) -> str:
        """Return how to install this version of torch, in the build for the machine's devices."""
        if self.built_from is not None:
            return f"Pin one version of torch in {self.built_from}, and run again."
        base = ".".join(map(str, _numbers(version)))
        kinds = self.devices.get(node, ())
        choice = choose_torch(packages.os, packages.arch, nvidia="cuda" in kinds, amd=False)
        if not choice.possible:
            return _leave_out(node, choice.why)
        index = f" --index-url {choice.index}" if choice.index else ""
        return f"On {node} run `{_pip(packages)} install torch=={base}{index}`{_OR_SYNC}"


def _leave_out(node: str, why: str) -> str:
    return f"Leave {node} out with `--on`: {why}."


def _pip(packages: InstalledPackages | None) -> str:
    python = packages.executable if packages is not None else ""
    if not is_printable(python) or not python or set(python) & _BREAKS_A_COMMAND:
        return "python -m pip"
    return f'"{python}" -m pip' if " " in python else f"{python} -m pip"


def _python(
    reference: InstalledPackages, node: str, packages: InstalledPackages
) -> Iterator[CompatibilityFinding]:
    ours, theirs = _numbers(reference.python), _numbers(packages.python)
    if ours[:2] == theirs[:2] and reference.implementation == packages.implementation:
        return
    here = _python_name(reference)
    fix = f"If the script fails there, install {here} on {node} and Barnraise in it."
    sentence = f"{node} runs {_python_name(packages)}, and here it is {here}."
    yield CompatibilityFinding(level="risky", about="python", node=node, sentence=sentence, fix=fix)


def _python_name(packages: InstalledPackages) -> str:
    version = ".".join(map(str, _numbers(packages.python)[:2])) or packages.python
    return (
        f"Python {version}"
        if packages.implementation == "CPython"
        else f"{packages.implementation} {version}"
    )


def _cuda(
    needs: ScriptImports, node: str, devices: Mapping[str, Sequence[str]]
) -> Iterator[CompatibilityFinding]:
    if needs.cuda is None or "cuda" in devices.get(node, ()):
        return
    yield CompatibilityFinding(
        level="impossible",
        about="device",
        node=node,
        sentence=f"{node} has no CUDA device and is left out: {needs.cuda}",
        fix="To use it too, let the script choose: "
        'device = torch.accelerator.current_accelerator() or torch.device("cpu")',
    )


def _torch(
    reference: InstalledPackages, others: Mapping[str, InstalledPackages], needs: ScriptImports, fixes: _Fixes
) -> Iterator[CompatibilityFinding]:
    # The starting machine may have no torch; then the first machine with torch is the reference.
    place, expected = next(
        ((where, each.torch) for where, each in _references(reference, others) if each.torch),
        ("", None),
    )
    needed = "torch" in needs.required
    named = needed or "torch" in needs.optional
    for node, packages in others.items():
        if packages.torch is None:
            if named:
                yield CompatibilityFinding(
                    level="impossible" if needed else "risky",
                    about="torch",
                    node=node,
                    sentence=f"{node} has no torch, and the script imports it.",
                    fix=_missing_torch(node, packages, fixes),
                )
            continue
        if expected is None or packages.torch == expected:
            continue
        sentence = f"{node} has torch {packages.torch}, and {place} it is {expected}"
        if _numbers(packages.torch)[:2] == _numbers(expected)[:2]:
            yield CompatibilityFinding(level="fine", about="torch", node=node, sentence=f"{sentence}.")
            continue
        yield CompatibilityFinding(
            level="impossible" if named else "risky",
            about="torch",
            node=node,
            sentence=f"{sentence}: they cannot train in one group.",
            fix=fixes.torch(node, packages, expected),
        )


def _references(
    reference: InstalledPackages, others: Mapping[str, InstalledPackages]
) -> Iterator[tuple[str, InstalledPackages]]:
    yield "here", reference
    yield from ((f"on {node}", packages) for node, packages in others.items())


def _missing_torch(node: str, packages: InstalledPackages, fixes: _Fixes) -> str:
    if fixes.built_from is not None:
        return f"Add torch to {fixes.built_from}, and run again."
    choice = choose_torch(packages.os, packages.arch, nvidia=False, amd=False)
    if not choice.possible:
        return _leave_out(node, choice.why)
    return f"On {node} run `barnraise torch --install`."


def _package(
    name: str,
    required: bool,
    reference: InstalledPackages,
    others: Mapping[str, InstalledPackages],
    fixes: _Fixes,
) -> Iterator[CompatibilityFinding]:
    expected = reference.package(name)
    known = expected or next(
        (package for packages in others.values() if (package := packages.package(name))), None
    )
    if known is None:
        sentence = f"{name} is imported by the script, and no machine has it."
        if required:
            fix = fixes.install("", None, name, None)
            yield CompatibilityFinding(level="impossible", about="package", sentence=sentence, fix=fix)
        else:
            yield CompatibilityFinding(level="fine", about="package", sentence=sentence)
        return
    for node, packages in others.items():
        package = packages.package(name)
        if package is None:
            where = "imports it" if required else "imports it in some places"
            yield CompatibilityFinding(
                level="impossible" if required else "risky",
                about="package",
                node=node,
                sentence=f"{name} is missing on {node}, and the script {where}.",
                fix=fixes.install(node, packages, name, known),
            )
        elif expected is not None:
            yield from _versions(node, packages, package, expected, fixes)


def _versions(
    node: str, packages: InstalledPackages, package: Package, expected: Package, fixes: _Fixes
) -> Iterator[CompatibilityFinding]:
    same_origin = package.distribution == expected.distribution
    if not same_origin or not package.version or not expected.version or package.version == expected.version:
        return
    sentence = f"{node} has {package.name} {package.version}, and here it is {expected.version}."
    if _numbers(package.version)[:1] == _numbers(expected.version)[:1]:
        yield CompatibilityFinding(level="fine", about="package", node=node, sentence=sentence)
        return
    fix = fixes.install(node, packages, package.name, expected)
    yield CompatibilityFinding(level="risky", about="package", node=node, sentence=sentence, fix=fix)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: ``(2, 13, 0)`` for ``2.13.0+cpu``."""
    release = re.match(r"\s*v?(\d{1,9}(?:\.\d{1,9})*)", version)
    return tuple(map(int, release[1].split("."))) if release else ()
