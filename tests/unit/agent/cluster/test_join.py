"""The joining machine tries a code once, also after a restart of its agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from barnraise.agent.cluster.join import join
from barnraise.agent.daemon import Agent
from barnraise.agent_client.cluster_requests import JoinClusterRequest
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import PairingError
from barnraise.identity import NodeKey
from barnraise.pairing import Offerer, PairingCode, PairingOffer
from barnraise.transport.listener.preface import PREFACE_BYTES, encode_answer

CODE = PairingCode(7, ("crossover", "clockwork", "zebra"))
GUESS = PairingCode(7, ("crossover", "clockwork", "anchor"))


class FalseOfferer:
    """Machine that answers a joiner with its own guess at the code. It counts the proofs that it got."""

    def __init__(self, *, answers: bool = True) -> None:
        self.proofs = 0
        self.port = 0
        self._answers = answers

    async def __aenter__(self) -> FalseOfferer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(PREFACE_BYTES)
        writer.write(encode_answer(1))
        length = int.from_bytes(await reader.readexactly(4), "little")
        hello = await reader.readexactly(length)
        if self._answers:
            now = asyncio.get_running_loop().time()
            offer = PairingOffer(GUESS, "owner", key=NodeKey.generate(), name="evil", now=now)
            offerer = offer.take(now)
            assert isinstance(offerer, Offerer)
            answer = offerer.receive(hello).send
            assert answer is not None
            writer.write(len(answer).to_bytes(4, "little") + answer)
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
            self.proofs += 1
        writer.close()


def run_joins(directory: Path, server: FalseOfferer, restarts: list[bool]) -> list[str]:
    """Type the same code once for each element, after a restart of the agent where it says so.

    Return the errors.
    """

    async def main() -> list[str]:
        network = NetworkSettings(port=0, discovery_port=52998, addresses=("127.0.0.1",))
        settings = Settings(state=StateSettings(directory=str(directory)), network=network)
        errors = []
        async with server:
            agent = Agent(settings)
            await agent.start()
            for restart in restarts:
                if restart:
                    await agent.stop()
                    agent = Agent(settings)
                    await agent.start()
                try:
                    await join(agent, JoinClusterRequest(str(CODE), at=f"127.0.0.1:{server.port}"))
                except PairingError as error:
                    errors.append(error.message)
            await agent.stop()
        return errors

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
def test_code_that_a_false_offerer_answered_is_not_tried_again(tmp_path: Path) -> None:
    """An attacker advertises the number of the code, and gets a guess each time a person types the code."""
    server = FalseOfferer()
    errors = run_joins(tmp_path, server, [False, False, True])
    assert "ended the pairing" in errors[0]
    assert errors[1:] == ["this code was tried here before, and a code allows one try"] * 2
    assert server.proofs == 1


@pytest.mark.slow
def test_code_without_an_answer_may_be_tried_again(tmp_path: Path) -> None:
    errors = run_joins(tmp_path, FalseOfferer(answers=False), [False, False])
    assert errors == ["the other machine did not answer the code"] * 2
