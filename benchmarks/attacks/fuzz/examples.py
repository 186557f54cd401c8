"""Valid messages made from types: what a parser accepts is where mutations begin."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

_TEXTS = (
    "run-abcd",
    "a",
    "0" * 64,
    "0" * 32,
    "0" * 52,
    "0" * 16,
    "fp32",
    "cpu",
    "192.0.2.1",
    "https://192.0.2.1:52480",
    "https://192.0.2.1:52480/x",
    "train.py",
    "2.13.0",
    "AAAA",
    "A" * 86,
    "0" * 69,
    ".metadata",
    "__0_0.distcp",
    "all_reduce",
    "",
)
_DEEPEST = 12


def examples(decoder: msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any], count: int) -> list[bytes]:
    """Return up to ``count`` different messages that the decoder accepts, always the same ones."""
    encode: Callable[[Any], bytes] = (
        msgspec.json.encode if isinstance(decoder, msgspec.json.Decoder) else msgspec.msgpack.encode
    )
    shape, kept = inspect.type_info(decoder.type), dict[bytes, None]()
    for seed in range(8 * count):
        data = encode(_value(shape, Random(seed), 0))
        try:
            decoder.decode(data)
        except (msgspec.DecodeError, ValueError):  # a rule that the type does not show
            continue
        kept[data] = None
        if len(kept) == count:
            break
    return list(kept)


def _value(shape: inspect.Type, random: Random, depth: int) -> Any:
    match shape:
        case inspect.UnionType(types=types):
            simple = [kind for kind in types if isinstance(kind, inspect.NoneType)]
            chosen = simple if simple and depth > _DEEPEST else list(types)
            return _value(random.choice(chosen), random, depth)
        case inspect.StructType():
            return _struct(shape, random, depth)
        case inspect.DictType():
            return {
                _value(shape.key_type, random, depth + 1): _value(shape.value_type, random, depth + 1)
                for _ in range(_length(shape, random, depth))
            }
        case inspect.TupleType(item_types=types):
            return [_value(kind, random, depth + 1) for kind in types]
        case inspect.NamedTupleType(fields=fields):
            return [_value(field.type, random, depth + 1) for field in fields]
        case inspect.ListType() | inspect.SetType() | inspect.FrozenSetType() | inspect.VarTupleType():
            return [_value(shape.item_type, random, depth + 1) for _ in range(_length(shape, random, depth))]
        case _:
            return _plain(shape, random)


def _struct(shape: inspect.StructType, random: Random, depth: int) -> Any:
    fields: dict[str, Any] = {}
    for field in shape.fields:
        if field.required or shape.array_like or random.random() < 0.7:
            fields[field.encode_name] = _value(field.type, random, depth + 1)
    tag = {} if shape.tag_field is None else {shape.tag_field: shape.tag}
    if shape.array_like:
        return [*([shape.tag] if shape.tag is not None else []), *fields.values()]
    return {**tag, **fields}


def _length(shape: Any, random: Random, depth: int) -> int:
    lower, upper = shape.min_length or 0, shape.max_length
    wanted = 0 if depth > _DEEPEST else random.randrange(3)
    return max(lower, wanted if upper is None else min(wanted, upper))


def _plain(shape: inspect.Type, random: Random) -> Any:
    match shape:
        case inspect.LiteralType(values=values):
            return random.choice(list(values))
        case inspect.EnumType(cls=cls):
            return random.choice(list(cls)).value
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.IntType() | inspect.FloatType():
            lower = shape.ge if shape.ge is not None else (shape.gt or 0) + (shape.gt is not None)
            upper = shape.le if shape.le is not None else lower + 100
            return random.choice((lower, upper, min(upper, lower + 1)))
        case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
            size = max(shape.min_length or 0, min(random.randrange(9), shape.max_length or 9))
            return random.randbytes(size)
        case inspect.StrType():
            return _text(shape, random)
        case _:
            return None


def _text(shape: inspect.StrType, random: Random) -> str:
    longest = shape.max_length if shape.max_length is not None else 999
    fitting = [
        text
        for text in _TEXTS
        if (shape.min_length or 0) <= len(text) <= longest
        and (shape.pattern is None or re.search(shape.pattern, text))
    ]
    return random.choice(fitting) if fitting else "x" * (shape.min_length or 1)
