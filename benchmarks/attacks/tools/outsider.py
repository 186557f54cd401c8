"""Attacks by unpaired machines on the same network; some know the discovery secret, or an old key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from barnraise.agent.cluster.join import pair_with
from barnraise.core.errors import BarnraiseError
from barnraise.discovery.datagrams import Datagram, encode_datagram
from barnraise.discovery.mdns import MdnsFinder
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.identity.trust import encode_entry
from barnraise.pairing import Joiner, PeerIntroduction, offer_tag, parse_code
from barnraise.transport.control.agent_tls import AGENT_RUN, AgentTls, TlsSession
from barnraise.transport.control.dial import DialOptions, dial_unopened
from barnraise.transport.listener.preface import (
    ANSWER_BYTES,
    ANY_AGENT,
    PAIRING_KEY,
    PREFACE_BYTES,
    ROUTE_AGENT,
    ROUTE_PAIRING,
    Preface,
    encode,
    encode_answer,
)
from benchmarks.attacks.tools.toolbox import READY, Result, connect, more_descriptors, say, tool, until_end

_MDNS = ("224.0.0.251", 5353)


# pairing


@tool
async def join(code: str, host: str, port: int, keep: str = "", name: str = "friend") -> Result:
    """Pair as a machine does, without an agent; key and log are kept in a directory for later."""
    key, secret = NodeKey.generate(), parse_code(code)
    if keep:
        Path(keep).mkdir(mode=0o700)
        key = NodeKey.load_or_create(Path(keep) / "key")
    me = PeerIntroduction(name=name, platform="Linux x86_64", addresses=("192.0.2.9",), port=9)
    begin = time.monotonic()
    try:
        joined = await pair_with(Joiner(secret, key, me), secret, host, port)
    except BarnraiseError as error:
        return {"joined": False, "words": error.message, "seconds": time.monotonic() - begin}
    if keep:
        lines = [encode_entry(entry).hex() for entry in joined.log.entries]
        (Path(keep) / "log").write_text("\n".join(lines))
    return {"joined": True, "role": joined.role, "node": key.id.raw.hex(), "entries": len(joined.log)}


@tool
async def relay(
    listen: int, host: str, port: int, record: str = "", way: str = "", at: int = -1, seconds: float = 120.0
) -> Result:
    """Relay one pairing between joiner and offerer: record the joiner's bytes, or change a byte."""
    over: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    async def pump(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray, changes: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if changes and len(kept) <= at < len(kept) + len(data):
                    place = at - len(kept)
                    data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                kept += data
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        up, down = bytearray(), bytearray()
        await asyncio.gather(pump(source, back, up, way == "up"), pump(there, sink, down, way == "down"))
        if record:
            Path(record).write_bytes(up)
        if not over.done():
            over.set_result({"up": len(up), "down": len(down)})

    server = await asyncio.start_server(serve, "0.0.0.0", listen)
    READY.get()()
    async with server, asyncio.timeout(seconds):
        return await over


@tool
async def replay(record: str, number: int, host: str, port: int) -> Result:
    """Replay the bytes of a joiner, unchanged, and then behind a fresh preface for the open code."""
    recorded = Path(record).read_bytes()
    as_it_was = await say(host, port, recorded)
    fresh = encode(Preface(offer_tag(number), os.urandom(16), ROUTE_PAIRING), PAIRING_KEY)
    again = await say(host, port, fresh + recorded[PREFACE_BYTES:], seconds=8.0)
    return {"as_it_was": len(as_it_was), "behind_a_fresh_preface": len(again)}


# as a member


@tool
async def come_as_member(
    agents: Sequence[Sequence[Any]],
    secrets: Sequence[str],
    trusted: Sequence[str],
    keep: str = "",
    claims: str = "",
    times: int = 1,
) -> Result:
    """Dial agents with a key of one's own, with one that was kept, or in the name of another."""
    key = NodeKey.load_or_create(Path(keep) / "key") if keep else NodeKey.generate()
    if claims:
        key.id = NodeId(bytes.fromhex(claims))  # the certificate names this one and is signed by our own
    nodes = [NodeId(bytes.fromhex(node)) for node in trusted]
    tls = AgentTls(delegate(key, run=AGENT_RUN, worker=os.urandom(16)), lambda: nodes)
    entered, words = 0, Counter[str]()
    for _ in range(times):
        for host, port in agents:
            for secret in secrets:
                try:
                    options = DialOptions(ROUTE_AGENT, ANY_AGENT, bytes.fromhex(secret), tls, expect=None)
                    link = await dial_unopened(host, port, options)
                    link.begin(lambda link, message: None, lambda link, why: None)
                    entered += 1
                    link.close("it was let in")
                except BarnraiseError as error:
                    words[error.message.removeprefix(f"{host}:{port}").strip(": ")] += 1
    return {"entered": entered, "words": dict(words)}


@tool
async def steal_advert(tag: str, listen: int, agents: Sequence[Sequence[Any]], seconds: float) -> Result:
    """Advertise the cluster's own tag, answer callers as far as possible, and replay their bytes."""
    key = NodeKey.generate()
    tls = AgentTls(delegate(key, run=AGENT_RUN, worker=os.urandom(16)), lambda: [key.id])
    prefaces: list[bytes] = []
    certificates = 0

    async def serve(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        nonlocal certificates
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(3.0):
                prefaces.append(await source.readexactly(PREFACE_BYTES))
                sink.write(encode_answer(1))
                session = tls.session(server_side=True)
                while not (await _feed(session, source, sink)):
                    pass
                certificates += session.object.getpeercert(True) is not None
        sink.close()

    finder = MdnsFinder()
    await finder.start(lambda sighting: None)
    async with await asyncio.start_server(serve, "0.0.0.0", listen):
        finder.advertise(frozenset({tag}), listen)
        end = time.monotonic() + 60.0
        while not prefaces and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
    await finder.stop()
    shown = [await _use_preface(preface, *where) for preface in prefaces[:2] for where in agents]
    return {
        "callers": len(prefaces),
        "certificates": certificates,
        "replayed": len(shown),
        "answered": sum(answered for answered, _ in shown),
        "certificates_of_agents": sum(certificate for _, certificate in shown),
    }


async def _use_preface(preface: bytes, host: str, port: int) -> tuple[bool, bool]:
    """Show an agent what another one showed us: does it answer, and does it show its certificate?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    session = TlsSession(context, server_side=False)
    answer, shown = b"", False
    source, sink = await asyncio.open_connection(host, port)
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(3.0):
            sink.write(preface)
            answer = await source.readexactly(ANSWER_BYTES)
            while not await _feed(session, source, sink):
                pass
            shown = session.object.getpeercert(True) is not None
    sink.close()
    return bool(answer), shown


async def _feed(session: TlsSession, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> bool:
    done = session.handshake()
    sink.write(session.outgoing())
    if not done:
        data = await source.read(65536)
        if not data:
            raise ConnectionResetError
        session.feed(data)
    return done


# too much, too large, too slow


@tool
async def garbage(agents: Sequence[Sequence[Any]], secret: str, times: int) -> Result:
    """Send malformed bytes instead of a preface, and after one that is valid by the known secret."""
    known = bytes.fromhex(secret)
    chance = random.Random(7)
    answered = 0
    for _ in range(times):
        fresh = encode(Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT), known)
        forged = encode(Preface(ANY_AGENT, os.urandom(16), ROUTE_AGENT), os.urandom(32))
        rejected_input = [
            b"",
            chance.randbytes(PREFACE_BYTES),
            chance.randbytes(100_000),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200),
            b"\x16\x03\x01\xff\xff" + bytes(600),
            forged,
            fresh[:12] + b"\x09" + fresh[13:],
            encode(Preface(os.urandom(16), os.urandom(16), ROUTE_PAIRING), PAIRING_KEY),
        ]
        accepted_prefaces = [
            fresh + chance.randbytes(2000),
            encode(Preface(ANY_AGENT, os.urandom(16), 3), known) + b"\x16\x03\x03\x40\x01" + bytes(16385),
            encode(Preface(ANY_AGENT, os.urandom(16), 2), known) + struct.pack("<I", 2**31) + bytes(64),
            encode(Preface(ANY_AGENT, os.urandom(16), 2, plaintext=True), known) + bytes(64),
            encode(Preface(ANY_AGENT, os.urandom(16), 2, version_min=9, version_max=9), known),
        ]
        attempts = [(host, port, words) for host, port in agents for words in rejected_input]
        heard = await asyncio.gather(*(say(*attempt, seconds=0.5) for attempt in attempts))
        answered += sum(map(bool, heard))
        attempts = [(host, port, words) for host, port in agents for words in accepted_prefaces]
        await asyncio.gather(*(say(*attempt, seconds=0.5) for attempt in attempts))
    return {"answered_without_preface": answered}


@tool
async def flood(host: str, port: int, silent: int, half: int, seconds: float, max_open: int) -> Result:
    """Open many connections that send nothing, or half a preface; soon at most ``max_open`` stay open."""
    more_descriptors()
    READY.get()()
    begin = time.monotonic()
    words = [b""] * silent + [b"BARNRAIS" + bytes(32)] * half
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for start in range(0, len(words), 50):
        batch = words[start : start + 50]
        opened = await asyncio.gather(*(connect(host, port) for _ in batch))
        for data, connection in zip(batch, opened, strict=True):
            if connection is not None:
                connections.append(connection)
                connection[1].write(data)
    await asyncio.sleep(max(0.5, seconds - (time.monotonic() - begin)))
    end = time.monotonic() + 30.0
    while (open_still := sum(not reader.at_eof() for reader, _ in connections)) > max_open:
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.2)
    for _, writer in connections:
        writer.transport.abort()
    return {"opened": len(connections), "open_still": open_still}


@tool
async def crowd(host: str, port: int, number: int, people: int, seconds: float) -> Result:
    """Open ``people`` pairing requests that then stay silent; rejected ones connect again."""
    more_descriptors()
    end = time.monotonic() + seconds
    visits = 0

    async def one() -> None:
        nonlocal visits
        while time.monotonic() < end:
            visits += 1
            preface = encode(Preface(offer_tag(number), os.urandom(16), ROUTE_PAIRING), PAIRING_KEY)
            await say(host, port, preface, seconds=5.0)
            await asyncio.sleep(0.5)

    async def tell() -> None:
        await asyncio.sleep(0.5)
        READY.get()()

    await asyncio.gather(tell(), *(one() for _ in range(people)))
    return {"visits": visits}


@tool
async def hasty(host: str, port: int, number: int, times: int) -> Result:
    """Open pairing requests and close them at once, again and again."""
    for _ in range(times):
        with contextlib.suppress(OSError):
            _, sink = await asyncio.open_connection(host, port)
            sink.write(encode(Preface(offer_tag(number), os.urandom(16), ROUTE_PAIRING), PAIRING_KEY))
            await sink.drain()
            sink.close()
            await asyncio.sleep(0.005)
    return {"times": times}


@tool
async def drip(
    host: str, port: int, secret: str, number: int, each: int = 3, seconds: float = 20.0
) -> Result:
    """Send one byte a second in the preface, in TLS and in a pairing, and time each until it is closed."""
    known = bytes.fromhex(secret)

    async def one(begin: bytes, rest: bytes) -> float:
        source, sink = await asyncio.open_connection(host, port)
        at = time.monotonic()
        sink.write(begin)
        ended = asyncio.ensure_future(until_end(source))
        for byte in rest[: int(seconds)]:
            with contextlib.suppress(OSError):
                sink.write(bytes([byte]))
                await sink.drain()
            done, _ = await asyncio.wait([ended], timeout=1.0)
            if done:
                break
        ended.cancel()
        sink.transport.abort()
        return time.monotonic() - at

    def fresh(route: int, target: bytes, key: bytes) -> bytes:
        return encode(Preface(target, os.urandom(16), route), key)

    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    message = struct.pack("<I", 60) + bytes(60)
    kinds = {
        "preface": [(b"", fresh(ROUTE_AGENT, ANY_AGENT, known))] * each,
        "tls": [(fresh(ROUTE_AGENT, ANY_AGENT, known), hello) for _ in range(each)],
        "pairing": [(fresh(ROUTE_PAIRING, offer_tag(number), PAIRING_KEY), message) for _ in range(each)],
    }
    borne = await asyncio.gather(*(one(*words) for kind in kinds.values() for words in kind))
    return {kind: max(borne[place * each : (place + 1) * each]) for place, kind in enumerate(kinds)}


@tool
async def datagrams(agents: Sequence[str], own: str, port: int, tag: str, each: int) -> Result:
    """Send random and false packets to the discovery port and over mDNS."""
    chance = random.Random(11)
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        for number in range(each):
            strange = Datagram("question", os.urandom(16).hex(), 9)
            stolen = Datagram("answer" if number % 2 else "question", tag, 1024 + number % 60_000)
            words = [chance.randbytes(chance.choice((0, 1, 24, 24, 512, 1400)))]
            words += [encode_datagram(strange), encode_datagram(stolen), bytes(60_000)]
            for host in agents:
                for data in words[: 4 if number % 50 == 0 else 3]:
                    sent += _send(sender, data, (host, port))
            for data in _mdns_packets(chance, number, tag, own):
                sent += _send(sender, data, _MDNS)
            if number % 20 == 0:
                await asyncio.sleep(0.01)
    return {"sent": sent}


def _mdns_packets(chance: random.Random, number: int, tag: str, own: str) -> list[bytes]:
    """Return mDNS packets: noise, a name that points at itself, false counts, and adverts with the cluster's
    tag.
    """
    loop = struct.pack(">6H", 0, 0x8400, 0, 1, 0, 0) + b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 60, 0)
    empty = struct.pack(">6H", 0, chance.getrandbits(16), *[0xFFFF] * 4) + chance.randbytes(40)
    service = b"\x09_barnraise\x04_tcp\x05local\x00"
    instance = b"\x20" + os.urandom(16).hex().encode() + service
    server = b"\x10" + os.urandom(8).hex().encode() + b"\x05local\x00"
    text = b"t=" + tag.encode()
    where = own if number % 2 else f"10.{chance.randrange(256)}.{chance.randrange(256)}.7"

    def record(name: bytes, kind: int, data: bytes) -> bytes:
        return name + struct.pack(">HHIH", kind, 1, 4500, len(data)) + data

    advert = struct.pack(">6H", 0, 0x8400, 0, 4, 0, 0)
    advert += record(service, 12, instance)
    advert += record(instance, 33, struct.pack(">HHH", 0, 0, 1024 + number) + server)
    advert += record(instance, 16, bytes([len(text)]) + text)
    advert += record(server, 1, socket.inet_aton(where))
    return [chance.randbytes(chance.choice((11, 12, 60, 500))), loop, empty, advert]


def _send(sender: socket.socket, data: bytes, target: tuple[str, int]) -> int:
    with contextlib.suppress(OSError):
        return sender.sendto(data, target) * 0 + 1
    return 0
