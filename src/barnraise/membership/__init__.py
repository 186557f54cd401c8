"""Membership of the cluster: one agreed history of views through any death, partition or sleep.

Decisions are pure: `consensus`, `election`, `view`, `failure_detector` and `node` take events and the time,
and return effects. So thousands of schedules can be simulated in one test. `storage` keeps on disk what must
survive a power cut. Connections belong in ``agent``. Imports ``identity`` and ``core``; never torch.
"""

from barnraise.membership.node import MembershipNode
from barnraise.membership.view import MembershipView, PresentMember

__all__ = ["MembershipNode", "MembershipView", "PresentMember"]
