"""Who is here: one agreed history of views through any death, partition or sleep.

Decisions are pure (`agreement`, `view`, `health`, `member`): they get events and the time and give back
effects, so that thousands of schedules can be simulated in one test. `storage` keeps on disk what must
outlive a power cut. May import ``identity`` and ``core``; never torch.
"""

from barnraise.membership.node import MembershipNode
from barnraise.membership.view import MembershipView, PresentMember

__all__ = ["MembershipNode", "MembershipView", "PresentMember"]
