"""Changes to valid bytes: single bytes, pieces of other inputs, lengths at the edges, deep nests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

MAX_INPUT = 1 << 20
_EDGES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7)
# Lengths of a gigabyte and more, in the forms of msgpack: arrays, maps, bytes, text and extensions.
_CLAIMS = tuple(bytes([kind]) + b"\x7f\xff\xff\xff" for kind in (0xDD, 0xDF, 0xC6, 0xDB, 0xC9))


def mutated(random: Random, data: bytes) -> bytes:
    """Return the data with one to three bytes changed, removed or added."""
    if not data:
        return random.randbytes(3)
    changed = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(changed))
        draw = random.random()
        if draw < 0.6:
            changed[place] = random.getrandbits(8)
        elif draw < 0.8 and len(changed) > 1:
            del changed[place]
        else:
            changed.insert(place, random.getrandbits(8))
    return bytes(changed)


def hostile(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return an input that begins with a seed: most are almost valid, some are nothing of the kind."""
    data = random.choice(seeds) if seeds else b""
    draw = random.random()
    place = random.randrange(len(data) + 1)
    if draw < 0.5:
        return mutated(random, data)
    if draw < 0.6:
        return data[:place]
    if draw < 0.7 and len(seeds) > 1:
        other = random.choice(seeds)
        return data[:place] + other[random.randrange(len(other) + 1) :]
    if draw < 0.8:
        return data[:place] + random.choice(_EDGES) + data[place + random.randrange(9) :]
    if draw < 0.88:
        return data[:place] + random.choice(_CLAIMS) + data[place + 1 :]
    if draw < 0.92:
        nest = random.choice((b"\x91", b"\x81\xa0", b"[", b'{"":'))
        return data[:place] + nest * random.choice((10, 1000, 30_000)) + data[place:]
    if draw < 0.96:
        return data * random.randrange(2, 5)
    return random.randbytes(random.choice((0, 1, 33, 400, 5000)))
