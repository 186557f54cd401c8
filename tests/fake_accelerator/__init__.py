"""Accelerator for tests: a device of torch's kind PrivateUse1, named ``fake``, whose memory is the host's.

`load` compiles it once (a minute) into a folder, and registers it in this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

_SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "fake"


def why_unavailable() -> str | None:
    """Return why the device cannot be compiled here, or None."""
    return None if shutil.which("g++") else "g++ is missing"


def build(folder: Path) -> Path:
    """Compile the device unless the folder has it already, and return the library."""
    text = _SOURCE.read_bytes() + torch.__version__.encode()
    library = folder / f"fake-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(".draft")
        torch_libraries = Path(torch.__file__).parent / "lib"
        words = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", str(_SOURCE), "-o", str(draft)]
        words += [word for path in include_paths() for word in ("-isystem", path)]
        words += [f"-L{torch_libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_libraries}"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the fake accelerator cannot be compiled:\n{done.stderr[-4000:]}")
        draft.rename(library)
    return library


def load(library: Path) -> torch.device:
    """Register the device in this process, once; return it."""
    if not hasattr(torch, _NAME):
        torch.utils.rename_privateuse1_backend(_NAME)
        torch._register_device_module(_NAME, _module())
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL).register_fake_accelerator()
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device(_NAME, 0)


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{_NAME}")
    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": lambda device=None: None,
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module
