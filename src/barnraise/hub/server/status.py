"""What a hub says of its run to whoever asks."""

from __future__ import annotations

from barnraise.hub.protocol.messages import PROTOCOL, RunDescription, VectorLayout
from barnraise.hub.rounds.state_machine import RoundState
from barnraise.hub.storage.create import HubFounding
from barnraise.identity.node_id import NodeId


def described(
    hub: NodeId, founding: HubFounding, layout: VectorLayout | None, state: RoundState, store: str | None
) -> RunDescription:
    return RunDescription(
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
