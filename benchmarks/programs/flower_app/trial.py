"""Flower app that does not train: every client adds one to every parameter, and one of them may misbehave.

`update` sets the answer of the client with partition-id 0 (of all clients for int8). Its values are plain,
nan, shape (another shape), oversize (ten times as many parameters), huge (a hundredfold) and int8. `late-s`
is how long that client waits. Each round appends a line to the file `trace`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg, FedTrimmedAvg  # type: ignore[import-not-found]

_ARRAYS = 10

client = ClientApp()
server = ServerApp()


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    settings = context.run_config
    arrays = [array + np.float32(1) for array in message.content["arrays"].to_numpy_ndarrays()]
    if context.node_config["partition-id"] == 0:
        time.sleep(float(settings["late-s"]))
        arrays = _misbehave(str(settings["update"]), arrays)
    if settings["update"] == "int8":
        arrays = [np.clip(array, -127, 127).astype(np.int8) for array in arrays]
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)


def _misbehave(how: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    if how == "nan":
        arrays[0][0] = np.nan
    if how == "huge":
        return [array * np.float32(100) for array in arrays]
    if how == "shape":
        arrays[0] = arrays[0][:-1]
    if how == "oversize":
        return [np.tile(array, 10) for array in arrays]
    return arrays


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    trace = Path(str(settings["trace"]))
    values = int(float(settings["megabytes"]) * 1e6) // 4 // _ARRAYS

    def note(server_round: int, arrays: ArrayRecord) -> None:
        several = arrays.to_numpy_ndarrays()
        line = {
            "round": server_round,
            "at": time.time(),
            "pid": os.getpid(),
            "dtype": str(several[0].dtype),
            "values": sum(array.size for array in several),
            "finite": all(bool(np.isfinite(array).all()) for array in several),
            "largest": max(float(np.nanmax(array)) for array in several),
        }
        with trace.open("a") as file:
            file.write(json.dumps(line) + "\n")

    rule = FedTrimmedAvg if settings["strategy"] == "trimmed" else FedAvg
    clients = int(settings["clients"])
    strategy = rule(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    # Random, since equal chunks are kept and sent once only.
    random = np.random.default_rng(1)
    initial = ArrayRecord([random.random(values, dtype=np.float32) for _ in range(_ARRAYS)])
    rounds, timeout = int(settings["rounds"]), float(settings["timeout"])
    strategy.start(grid, initial, num_rounds=rounds, timeout=timeout, evaluate_fn=note)
