"""Write .ci/hashes.txt: the pins of .ci/requirements.txt with the hashes of their files.

    python .ci/lock.py

The hosted checks install it with `pip install --no-deps --require-hashes`. torch is left out: its CPU build
comes from an index of its own, before the others.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

ON_WINDOWS = [("colorama", "0.4.6")]  # for pytest and tqdm
HERE = Path(__file__).parent
# The systems and versions that the hosted checks run on.
WANTED = re.compile(
    r"-(py2\.py3|py3|cp311|cp313|cp3\d+-abi3|cp310|cp39|cp38|cp37|cp36)-?"
    r".*(none-any|manylinux[\w.]*x86_64|macosx[\w.]*(arm64|universal2)|win_amd64)\.whl$"
)


def pins() -> list[tuple[str, str]]:
    """Return names and versions, without torch."""
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lists = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return [(name, version) for name, version in lists if name != "torch"] + ON_WINDOWS


def hashes(name: str, version: str) -> list[str]:
    """Return the hashes of the files that the hosted checks can install."""
    project = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"https://pypi.org/simple/{project}/", timeout=60) as answer:
        page = answer.read().decode("utf-8")
    files = {file: digest for digest, file in re.findall(r'#sha256=([0-9a-f]{64})"[^>]*>([^<]+)</a>', page)}
    begin = re.compile(
        rf"{re.sub(r'[-_.]+', '[-_.]+', name)}-{re.escape(version)}(-|\.tar\.gz$)", re.IGNORECASE
    )
    ours = [file for file in files if begin.match(file)]
    wheels = [file for file in ours if WANTED.search(file)]
    return sorted(files[file] for file in wheels or ours if file.endswith((".whl", ".tar.gz")))


def main() -> int:
    text = "# Made by `python .ci/lock.py` from requirements.txt.\n"
    for name, version in pins():
        known = hashes(name, version)
        if not known:
            print(f"{name} {version} has no file for the hosted checks", file=sys.stderr)
            return 1
        text += f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in known) + "\n"
    (HERE / "hashes.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
