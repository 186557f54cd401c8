"""The modules of the source tree, found by walking it, and the rules about torch."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

TORCH_PACKAGES = frozenset(
    {
        "collectives",
        "compression",
        "checkpoint",
        "training",
        "hub",
        "worker",
        "integrations",
        "rpc",
        "testing",
    }
)
# Inside collectives, what the communication process and the planners use; a package stands for its modules.
TORCH_FREE_IN_COLLECTIVES = ("algorithms", "comm_process", "messages", "ops.dtypes")


def files() -> list[Path]:
    return sorted(SOURCE.glob("barnraise/**/*.py"))


def module_name(file: Path) -> str:
    parts = list(file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_torch_free(module: str) -> bool:
    """Tell whether the design forbids torch in a module."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] not in TORCH_PACKAGES:
        return True
    if parts[1] == "collectives":
        inner = ".".join(parts[2:])
        return not inner or any(
            inner == free or inner.startswith(f"{free}.") for free in TORCH_FREE_IN_COLLECTIVES
        )
    return False


def torch_free_modules() -> list[str]:
    return [name for name in map(module_name, files()) if is_torch_free(name)]
