"""Member in its own process: takes a lease, waits for a line of input, delivers, and prints its messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from barnraise.hub.client.client import HubClient
from barnraise.hub.client.upload import push
from barnraise.hub.protocol.messages import Lease, LeaseRequest, VersionHead
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, declared, encoded


def main(address: str, hub: str, key: str, folder: Path) -> None:
    messages: list[str] = []
    client = HubClient([address], NodeId.parse(hub), NodeKey.load_or_create(Path(key)), say=messages.append)
    head = client.ask("GET", "/v1/head", VersionHead)
    lease = client.ask("POST", "/v1/leases", Lease, LeaseRequest(version=head.version))
    print(lease.id, flush=True)
    sys.stdin.readline()
    data = encoded(torch.randn(LAYOUT.numel) * 0.01, TERMS.codec, lease.version)
    file = folder / "update"
    file.write_bytes(data)
    progress = push(client, declared(lease, data), file)
    print(json.dumps({"accepted": progress.accepted, "said": messages}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
