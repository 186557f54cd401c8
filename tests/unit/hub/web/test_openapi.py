"""Fuzz test of the hub with its own OpenAPI document.

Valid and nearly valid requests, signed by the owner, a member and an unknown node, get documented statuses.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.hub.protocol.messages import Problem, decode_message
from barnraise.hub.protocol.signatures import sign_request, verify_response
from barnraise.hub.web.openapi import openapi_document
from barnraise.identity import NodeKey
from tests.unit.hub.attacked_hub import AttackedHub
from tests.unit.hub.hub_process import plainly

DESCRIBED = openapi_document()
SEEN = Counter[tuple[int, str, str]]()
ROUTES = [(method, path) for path, methods in DESCRIBED["paths"].items() for method in methods]
NONSENSE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.just([])
    | st.just({})
    | st.just("../" * 5 + "hub.db")
    | st.just(1 << 70)
)


def fitting(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of a schema, as far as the hub's messages use schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: fitting(DESCRIBED["components"]["schemas"][name]))
    if "anyOf" in schema:
        return st.one_of([fitting(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _KINDS[schema["type"]](schema)


def _object(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    properties = {name: fitting(property_schema) for name, property_schema in schema["properties"].items()}
    optional = {name: properties.pop(name) for name in [*properties] if name not in schema["required"]}
    return st.fixed_dictionaries(properties, optional=optional)


def _array(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "prefixItems" in schema:
        return st.tuples(*[fitting(item) for item in schema["prefixItems"]])
    return st.lists(fitting(schema["items"]), min_size=schema.get("minItems", 0), max_size=4)


def _string(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    return st.text(min_size=schema.get("minLength", 0), max_size=min(40, schema.get("maxLength", 40)))


def _number(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 1e6)
    return st.floats(low, high, allow_nan=False) | st.sampled_from([low, high])


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], st.SearchStrategy[Any]]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "number": _number,
    "integer": lambda schema: st.integers(schema.get("minimum"), schema.get("maximum")),
    "boolean": lambda schema: st.booleans(),
    "null": lambda schema: st.none(),
}


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """Change or remove one thing in a value."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        rest = {name: kept for name, kept in value.items() if name != key}
        return rest if draw(st.booleans()) else rest | {key: draw(spoilt(value[key]))}
    if isinstance(value, list | tuple) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(spoilt(value[place])), *value[place + 1 :]]
    return draw(NONSENSE)


@st.composite
def drawn_request(draw: st.DrawFn) -> tuple[str, str, dict[str, str], str, bytes]:
    """Draw a method, the described path, its parameters, the query and the body."""
    method, path = draw(st.sampled_from(ROUTES))
    route = DESCRIBED["paths"][path][method]
    names, query = {}, []
    for parameter in route["parameters"]:
        value = draw(fitting(parameter["schema"]) if draw(st.booleans()) else NONSENSE)
        if parameter["in"] == "path":
            names[parameter["name"]] = str(value)
        elif draw(st.booleans()):
            query.append(f"{parameter['name']}={quote(str(value), safe='')}")
    content = route.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        has_body = content or draw(st.integers(0, 9)) == 0
        return method, path, names, "&".join(query), draw(st.binary(max_size=200)) if has_body else b""
    value = draw(fitting(content["application/json"]["schema"]))
    if draw(st.booleans()):
        value = draw(spoilt(value))
    return method, path, names, "&".join(query), json.dumps(value).encode()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedHub]:
    made = AttackedHub(tmp_path_factory.mktemp("scene"))
    try:
        yield made
    finally:
        made.hub.kill()
        for friend in made.friends:
            friend.close()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=drawn_request(), signer=st.sampled_from(["owner", "member", "stranger"]), known=st.booleans())
def test_every_route_follows_openapi_document(
    scene: AttackedHub, drawn: tuple[str, str, dict[str, str], str, bytes], signer: str, known: bool
) -> None:
    method, path, names, query, body = drawn
    keys = {"owner": scene.owner.key, "member": scene.ann.key, "stranger": NodeKey.generate()}
    if known and "node" in names:
        names["node"] = str(scene.ann.key.id)
    url = path
    for name, value in names.items():
        url = url.replace(f"{{{name}}}", quote(value, safe="") or "-")
    query = query.replace("wait=", "wait=0&x=")
    headers = sign_request(keys[signer], method.upper(), url, query, body, scene.ann.hub, time.time())
    answer = plainly(
        f"{scene.hub.address}{url}?{query}", method=method.upper(), headers=headers, content=body
    )
    exchange = f"{method} {url}?{query} {body!r}: {answer.status_code} {answer.text[:500]}"
    SEEN[answer.status_code, method, path] += 1
    assert str(answer.status_code) in DESCRIBED["paths"][path][method]["responses"], exchange
    if answer.status_code >= 400:
        problem = decode_message(Problem, answer.content)
        assert problem.message, exchange
        # The web server answers unknown routes, without the hub's key. A blob is verified by its hash.
        if problem.kind not in ("route", "blob"):
            verify_response(scene.ann.hub, answer.status_code, answer.headers, answer.content, headers)
    assert "Traceback" not in scene.hub.output(), exchange


def test_hub_works_after_fuzzing(scene: AttackedHub) -> None:
    """The test above must run before, on the same hub, and must have sent enough requests."""
    reached = {(method, path) for status, method, path in SEEN if status not in (401, 404)}
    assert len(reached) >= len(ROUTES) - 3, SEEN
    friend = scene.member("late")
    assert friend.lease().spans
