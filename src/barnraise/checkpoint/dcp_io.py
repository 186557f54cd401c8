"""Reader and writer for torch's distributed checkpoint (DCP), whose files may be on other machines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from barnraise.checkpoint.shard_exchange import RETRY_HINT, error_text
from barnraise.core.errors import CheckpointError


class PathlessWriter(FileSystemWriter):
    """DCP writer whose pickled metadata has no path: Windows cannot unpickle a POSIX path."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class FetchingReader(FileSystemReader):
    """DCP reader that first fetches the files of this rank's part of the plan."""

    def __init__(self, folder: Path, fetch: Callable[[Collection[str]], None]) -> None:
        super().__init__(folder)
        self._fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self._fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


def stage(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state in main memory, which training does not change any more."""
    parts = {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state.items()}
    try:
        return BlockingAsyncStager().stage(parts)
    except RuntimeError as error:  # there is no memory for it
        raise CheckpointError(
            f"the state cannot be copied to main memory: {error_text(error)}",
            hint="Save without is_async, or use a machine with more memory.",
        ) from error


@contextmanager
def dcp_errors(action: str) -> Iterator[None]:
    """Convert DCP's exception, which lists the failures of all ranks, to CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {error_text(failure[0])}" for rank, failure in error.failures.items()
        )
        raise CheckpointError(f"{action}: {reasons}", hint=RETRY_HINT) from error
