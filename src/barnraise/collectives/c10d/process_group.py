"""Process group of the ``barnraise`` backend: the shell for every torch, and for groups that change.

torch calls its methods directly. Its rank and size may change, so it is also the shell of a group that torch
reconfigures (from torch 2.15 on).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import GroupName

from barnraise.collectives.c10d.operations import GroupOperations, OpenedGroup, seconds_of
from barnraise.collectives.c10d.reconfigure import Reconfiguration
from barnraise.collectives.work import BarnraiseWork, join_works


# torch's stubs give most operations a second form besides the one that torch calls: hence `misc`.
class BarnraiseProcessGroup(GroupOperations, dist.ProcessGroup):  # type: ignore[misc]
    """Process group of the ``barnraise`` backend.

    ``reconfiguration``: opens the group again with other members. Without it the members are fixed.
    """

    def __init__(
        self,
        opened: OpenedGroup | None,
        timeout_s: float,
        reconfiguration: Reconfiguration | None = None,
    ) -> None:
        rank, world = (opened.rank, opened.world) if opened is not None else (-1, -1)
        dist.ProcessGroup.__init__(self, rank, world)  # type: ignore[call-arg]  # the stub lacks this form
        GroupOperations.__init__(self, opened, timeout_s)
        self._name = ""
        self._description = ""
        self._reconfiguration = reconfiguration

    # methods that torch calls on every group

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._world

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the device types that DCP asks for before an asynchronous save.

        Tensors of other devices are staged through the CPU. A group without members has none. So torch 2.15
        does not attach its flight recorder, which fails for a group without a backend object.
        """
        return [torch.device("cpu")] if self._world > 0 else []

    def _get_backend(self, device: torch.device) -> BarnraiseProcessGroup:  # type: ignore[override]  # its own
        return self

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def supports_splitting(self) -> bool:
        return False

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = seconds_of(timeout, self._timeout_s)

    set_timeout = setTimeout

    def _start_coalescing(self, device: torch.device) -> None:
        self.begin_coalescing()

    def _end_coalescing(self, device: torch.device) -> BarnraiseWork:
        return self.join_coalesced()

    def get_error(self) -> ErrorType:
        """Return an error after an abort, until the group is opened again."""
        return ErrorType.COMM_ERROR if self._is_aborted else ErrorType.SUCCESS

    # other members

    @property
    def supports_reconfigure(self) -> bool:
        return self._reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """Return the text that other ranks need to open a group with this one."""
        return self._wanted().handle()

    def reconfigure(self, opts: Any) -> BarnraiseWork:
        """Open the group again with the ranks of these handles, and close the previous one.

        The call returns when the members are connected. The work that it returns is complete.
        """
        timeout_s = seconds_of(opts.timeout, self._timeout_s)
        self._connect(self._wanted().open(opts.uuid, opts.handles, timeout_s))
        return join_works([], [])

    def _wanted(self) -> Reconfiguration:
        if self._reconfiguration is None:
            raise dist.DistBackendError("this group was not created with enable_reconfigure=True")
        return self._reconfiguration
