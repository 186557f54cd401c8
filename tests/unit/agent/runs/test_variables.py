"""Values of ``--set``: machines of the run get them from each other's memory, and no other machine does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent import protocol
from barnraise.agent.api import runs_api
from barnraise.agent.runs import messages
from barnraise.agent.runs.messages import ValuesRequest, ValuesResponse
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.agent_client.run_requests import ResumeRunRequest
from barnraise.core.errors import RunError
from barnraise.identity import NodeId
from barnraise.runs.record import RunRecord, encode_record, sign_spec
from barnraise.runs.variables import VariableValues, seal
from tests.unit.runs.control.test_lifecycle import KEY, B, order

SECRET = "hf_a-very-secret-token"
RUN = "train-abcd"
STARTER, WORKER, OTHER = KEY.id, NodeId(B), NodeId(b"\x07" * 32)


def sealed() -> VariableValues:
    values = seal((("HF_TOKEN", SECRET),))
    assert values is not None
    return values


class Machine:
    """An agent of a cluster of owners, as its keeper sees it; messages arrive at once."""

    def __init__(self, me: NodeId, machines: dict[NodeId, Machine]) -> None:
        self.me, self.incarnation, self.storage, self.log = me, bytes(16), self, self
        self.kept: list[bytes] = []
        self._machines = machines
        machines[me] = self
        context: Any = self
        self.registry = RunRegistry(context)
        self.keeper = VariableKeeper(context, self.registry, patience_s=0.1)

    def role(self, node: NodeId) -> str:
        return "owner"

    def keep_run(self, name: str, value: bytes) -> None:
        self.kept.append(value)

    def linked_nodes(self) -> list[NodeId]:
        return [node for node in self._machines if node != self.me]

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        assert message[:1] == protocol.RUN
        decoded = messages.decode(message[1:])
        if isinstance(decoded, ValuesRequest | ValuesResponse):
            self._machines[node].keeper.received(self.me, decoded)


def between_machines(test: Callable[[dict[NodeId, Machine], VariableValues], Awaitable[None]]) -> None:
    """Start a run with a secret on the first machine, for the first two of three owners' machines."""

    async def main() -> None:
        machines: dict[NodeId, Machine] = {}
        values = sealed()
        spec = replace(order(), nodes=(STARTER.raw, WORKER.raw), variables=values.names)
        record = sign_spec(spec, KEY)
        for node in (STARTER, WORKER, OTHER):
            machine = Machine(node, machines)
            assert machine.registry.apply(record)
        machines[STARTER].keeper.keep(RUN, values)
        await test(machines, values)

    asyncio.run(main())


def test_machine_of_the_run_gets_the_values() -> None:
    async def test(machines: dict[NodeId, Machine], values: VariableValues) -> None:
        worker = machines[WORKER]
        assert await worker.keeper.values_of(worker.registry.runs[RUN]) == {"HF_TOKEN": SECRET}
        machines[STARTER].keeper.clear()  # its agent was restarted
        starter = machines[STARTER]
        assert await starter.keeper.values_of(starter.registry.runs[RUN]) == {"HF_TOKEN": SECRET}

    between_machines(test)


def test_no_value_is_saved() -> None:
    async def test(machines: dict[NodeId, Machine], values: VariableValues) -> None:
        worker = machines[WORKER]
        await worker.keeper.values_of(worker.registry.runs[RUN])
        assert all(machine.kept for machine in machines.values())
        assert not any(SECRET.encode() in value for machine in machines.values() for value in machine.kept)

    between_machines(test)


def test_owner_outside_of_the_run_gets_no_values() -> None:
    async def test(machines: dict[NodeId, Machine], values: VariableValues) -> None:
        other = machines[OTHER]
        with pytest.raises(RunError, match="no connected machine has the values of HF_TOKEN"):
            await other.keeper.values_of(other.registry.runs[RUN])

    between_machines(test)


def test_values_end_with_the_run() -> None:
    async def test(machines: dict[NodeId, Machine], values: VariableValues) -> None:
        starter, worker = machines[STARTER], machines[WORKER]
        entry = starter.registry.runs[RUN]
        starter.registry.apply(replace(entry.record, version=2, phase="ended"))
        with pytest.raises(RunError) as raised:
            await worker.keeper.values_of(worker.registry.runs[RUN])
        assert raised.value.hint is not None
        assert raised.value.hint.endswith("give them again: barnraise resume train-abcd --set HF_TOKEN")
        starter.keeper.drop(RUN)
        with pytest.raises(RunError):
            await starter.keeper.values_of(entry)

    between_machines(test)


def test_values_that_the_spec_does_not_commit_to_are_ignored() -> None:
    async def test(machines: dict[NodeId, Machine], values: VariableValues) -> None:
        machines[STARTER].keeper.keep(RUN, replace(values, values=(("HF_TOKEN", "forged"),)))
        worker = machines[WORKER]
        with pytest.raises(RunError):
            await worker.keeper.values_of(worker.registry.runs[RUN])
        worker.keeper.received(OTHER, ValuesResponse(RUN, values))  # it was not asked
        with pytest.raises(RunError):
            await worker.keeper.values_of(worker.registry.runs[RUN])

    between_machines(test)


def test_run_without_variables_asks_for_nothing() -> None:
    async def main() -> None:
        machine = Machine(STARTER, {})
        machine.registry.apply(sign_spec(order(), KEY))
        assert await machine.keeper.values_of(machine.registry.runs[RUN]) == {}

    asyncio.run(main())


def test_submit_keeps_values_in_memory_and_writes_only_names() -> None:
    async def main() -> None:
        written: list[RunRecord] = []
        machine = Machine(STARTER, {})

        async def write(entry: None, record: RunRecord) -> None:
            written.append(record)

        runs = SimpleNamespace(variables=machine.keeper, controller=SimpleNamespace(write=write))
        agent: Any = SimpleNamespace(
            runs=runs,
            key=KEY,
            name_of=lambda node: node.short,
            audit=SimpleNamespace(write=lambda *_, **__: None),
        )
        spec = replace(order(), nodes=(STARTER.raw,))
        await runs_api._submit(agent, spec, "started", (("HF_TOKEN", SECRET),))
        assert SECRET.encode() not in encode_record(written[0])
        machine.registry.apply(written[0])
        assert await machine.keeper.values_of(machine.registry.runs[RUN]) == {"HF_TOKEN": SECRET}

    asyncio.run(main())


def test_resume_without_a_value_names_the_option() -> None:
    async def main() -> None:
        machine = Machine(STARTER, {})
        machine.registry.apply(sign_spec(replace(order(), variables=sealed().names), KEY))
        entry = machine.registry.runs[RUN]
        with pytest.raises(
            RunError, match="was started with --set HF_TOKEN, and values are not kept"
        ) as raised:
            runs_api._check_variables(entry, ResumeRunRequest(run=RUN))
        assert raised.value.hint == "Give them again: barnraise resume train-abcd --set HF_TOKEN=VALUE"
        runs_api._check_variables(entry, ResumeRunRequest(run=RUN, variables=(("HF_TOKEN", "x"),)))

    asyncio.run(main())
