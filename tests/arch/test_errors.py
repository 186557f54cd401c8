"""One tree of errors: codes are unique and stable, and each has a page that says what to do."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from barnraise.core import errors
from barnraise.core.errors import BarnraiseError
from tests.arch.source_tree import ROOT, files, module_name

PAGES = ROOT / "docs" / "errors"
SECTIONS = ["What it means", "Common causes", "What to do"]

# Public names with their codes: scripts and log searches rely on them, so a change here is a breaking one.
FROZEN = {
    "AgentError": "agent",
    "BarnraiseError": "barnraise",
    "CheckpointError": "checkpoint",
    "CollectiveError": "collective",
    "ConfigError": "config",
    "DiscoveryError": "discovery",
    "HandshakeError": "handshake",
    "HubAway": "hub-away",
    "HubError": "hub",
    "HubRefused": "hub-refused",
    "IdentityError": "identity",
    "ListenerError": "listener",
    "MembershipError": "membership",
    "CommProcessLost": "comm-process-lost",
    "OperationAborted": "operation-aborted",
    "OperationMismatch": "operation-mismatch",
    "OperationTimeout": "operation-timeout",
    "PairingError": "pairing",
    "PeerLost": "peer-lost",
    "ProtocolError": "protocol",
    "RpcError": "rpc",
    "RunEnvironmentError": "run-environment",
    "RunError": "run",
    "ShippingError": "shipping",
    "StepFailed": "step-failed",
    "StoreAway": "store-away",
    "TorchMissing": "torch-missing",
    "TransportError": "transport",
    "TrustError": "trust",
    "UnsupportedOperation": "unsupported-operation",
    "UntrustedPickle": "untrusted-pickle",
    "WorkerRefused": "worker-refused",
}


def _tree(root: type[BarnraiseError]) -> Iterator[type[BarnraiseError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


CLASSES = [cls for cls in _tree(BarnraiseError) if cls.__module__ == errors.__name__]


def test_names_and_codes_are_frozen() -> None:
    assert {cls.__name__: cls.code for cls in CLASSES} == FROZEN


def test_errors_module_draws_its_own_tree() -> None:
    drawn = re.findall(r"^[│├└─ ]*([A-Z]\w+)$", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(drawn) == sorted(FROZEN)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_each_class_explains_itself(cls: type[BarnraiseError]) -> None:
    assert "code" in vars(cls), "a code of its own"
    assert "default_hint" in vars(cls), "a hint of its own"
    assert inspect.getdoc(cls)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.code)
    assert cls.default_hint.endswith(".")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_each_code_has_a_page(cls: type[BarnraiseError]) -> None:
    page = PAGES / f"{cls.code}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# `{cls.code}`: ")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    assert parts[1::2] == SECTIONS
    assert all(body.strip() for body in parts[2::2])
    assert f"({cls.code}.md) | `{cls.__name__}`" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_no_page_without_a_code() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"README"}
    assert pages == set(FROZEN.values())


def test_no_other_module_defines_an_error_of_its_own() -> None:
    """A subclass of our tree elsewhere would have no page; one of Exception would escape the tree."""
    definitions = []
    for file in files():
        if module_name(file) == errors.__name__:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                if bases & ({"Exception", "BaseException", "RuntimeError", "ValueError"} | set(FROZEN)):
                    definitions.append(f"{module_name(file)}.{node.name}")
    assert definitions == []
