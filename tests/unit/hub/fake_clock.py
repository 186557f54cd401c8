"""Wall clock of a real process, moved from outside while it runs. Its monotonic clock is not changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = sorted(Path("/usr/lib").glob("*-linux-gnu*/faketime/libfaketime.so.1"))


class FakeClock:
    """Wall clock of the processes that are started with its environment."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """Set the offset from the true time; it takes effect within about two seconds."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{seconds:+d}s\n")
        os.replace(draft, self._file)  # a reader never sees half a file

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
