"""Many nodes of Flower in one process, without their ClientApps, to measure the load the SuperLink sustains.

    flower_swarm.py ADDRESS NODES ROUNDS SECONDS

Each node is a thread with Flower's own Fleet connection. It pulls a message and all its objects, adds one to
every parameter and pushes the reply, as a SuperNode and a ClientApp would. The program prints `ready` when
all nodes are registered, and stops after ROUNDS rounds or SECONDS seconds. The last line reports times of
pulls and pushes, lost nodes, and whether headers signed for one request are valid for another.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import httpx
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.proto.fleet_pb2 import DeactivateNodeRequest  # type: ignore[import-not-found]
from flwr.supercore.inflatable.inflatable_object import (  # type: ignore[import-not-found]
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (  # type: ignore[import-not-found]
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supernode.fleet_http_connection import http_request_response  # type: ignore[import-not-found]

_POLL_S = 3.0  # as a SuperNode waits when there was no message


class Swarm:
    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.ends = time.monotonic() + seconds
        self.ready = 0
        self.pulls: list[float] = []
        self.pushes: list[float] = []
        self.lost: list[str] = []
        self.lock = threading.Lock()

    def node(self) -> None:
        try:
            with http_request_response(self.address, True, max_retries=5) as connection:
                with self.lock:
                    self.ready += 1
                while time.monotonic() < self.ends:
                    if not self.round(connection):
                        time.sleep(_POLL_S)
        except BaseException as error:  # noqa: BLE001  # Flower ends a node by SystemExit; the count is the figure
            self.lost.append(repr(error)[:200])

    def round(self, connection: Any) -> bool:
        _, receive, send, _, _, pull_object, push_object, confirm = connection
        begin = time.monotonic()
        if (received := receive()) is None:
            return False
        message, tree = received
        run = message.metadata.run_id
        names = [tree_node.object_id for tree_node in iterate_object_tree(tree)]
        contents = pull_objects(
            names, pull_object_fn=lambda name: pull_object(run, name), max_concurrent_pulls=1
        )
        confirm(run, message.metadata.message_id)
        full = inflate_object_from_contents(message.metadata.message_id, contents)
        full.metadata.__dict__["_message_id"] = message.metadata.message_id
        pulled = time.monotonic()
        arrays = [array + np.float32(1) for array in full.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 10})
        reply = Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=full)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        trained = time.monotonic()
        missing, session = send(reply, get_object_tree(reply), 0.0)
        for name, nested in get_all_nested_objects(reply).items():
            if name in missing:
                push_object(run, session, name, nested.deflate())
        with self.lock:
            self.pulls.append(pulled - begin)
            self.pushes.append(time.monotonic() - trained)
        return True


def signed_headers_are_reusable(address: str) -> bool:
    """Return True if headers that a node signed for its registration are accepted on another request."""
    seen: list[httpx.Request] = []
    original = httpx.Client.send

    def spy(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        seen.append(request)
        return original(self, request, **options)

    httpx.Client.send = spy  # type: ignore[method-assign]
    try:
        with http_request_response(address, True, max_retries=5) as connection:
            taken = {name: value for name, value in seen[0].headers.items() if name != "content-length"}
            body = DeactivateNodeRequest(node_id=connection[0]).SerializeToString()
            answer = httpx.post(f"http://{address}/v1/fleet/deactivate-node", headers=taken, content=body)
            return answer.status_code == 200
    finally:
        httpx.Client.send = original  # type: ignore[method-assign]


def main() -> None:
    address, seconds = sys.argv[1], float(sys.argv[4])
    nodes, rounds = int(sys.argv[2]), int(sys.argv[3])
    reusable = signed_headers_are_reusable(address)
    swarm = Swarm(address, seconds)
    threads = [threading.Thread(target=swarm.node, daemon=True) for _ in range(nodes)]
    for thread in threads:
        thread.start()
    while swarm.ready + len(swarm.lost) < nodes and time.monotonic() < swarm.ends:
        time.sleep(0.1)
    print("ready", swarm.ready, flush=True)
    while time.monotonic() < swarm.ends and len(swarm.pushes) < nodes * rounds:
        time.sleep(0.2)
    figures = {"registered": swarm.ready, "lost": len(swarm.lost), "why_lost": swarm.lost[:2]}
    figures |= {"pulls": swarm.pulls, "pushes": swarm.pushes, "signed_headers_are_reusable": reusable}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # the nodes need not say goodbye


if __name__ == "__main__":
    main()
