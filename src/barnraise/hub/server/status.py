"""What a hub says of its run to whoever asks."""

from __future__ import annotations

from barnraise.hub.protocol.messages import PROTOCOL, Description, Layout
from barnraise.hub.rounds.state_machine import State
from barnraise.hub.storage.create import Founding
from barnraise.identity.node_id import NodeId


def described(
    hub: NodeId, founding: Founding, layout: Layout | None, state: State, store: str | None
) -> Description:
    return Description(
        protocol=PROTOCOL,
        hub=str(hub),
        name=founding.name,
        owner=founding.owner,
        terms=founding.terms,
        code=founding.code,
        layout=layout,
        course=state.course,
        version=state.version,
        finished=state.is_finished,
        store=store,
    )
