"""Flower's merge rules on bad updates, without a network: five clients, one of which misbehaves.

Prints one JSON object. `refused` is the error that stopped the round for all clients.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg, FedTrimmedAvg, Krum  # type: ignore[import-not-found]

_CLIENTS, _NUMBERS = 5, 1000


@dataclass
class Reply:
    content: Any

    def has_error(self) -> bool:
        return False


def updates(kind: str) -> list[tuple[np.ndarray, float]]:
    random = np.random.default_rng(1)
    several = [random.normal(1, 0.1, _NUMBERS).astype(np.float32) for _ in range(_CLIENTS)]
    samples = [10.0] * _CLIENTS
    bad = several[0]
    if kind == "nan":
        bad[0] = np.nan
    if kind == "hundredfold":
        bad *= 100
    if kind == "other_shape":
        several[0] = bad[:-1]
    if kind == "one_number":
        several[0] = bad[:1] * 100
    if kind == "ten_times_the_size":
        several[0] = np.tile(bad, 10)
    if kind == "int8":
        several = [np.round(update * 100).astype(np.int8) for update in several]
    if kind == "claims_a_billion_samples":
        samples[0] = 1e9
        several[0] = -bad
    if kind == "negative_samples":
        samples[0] = -39.0
    return list(zip(several, samples, strict=True))


def merged(rule: Any, kind: str) -> dict[str, Any]:
    replies = []
    for update, samples in updates(kind):
        metrics = MetricRecord({"num-examples": samples})
        replies.append(Reply(RecordDict({"arrays": ArrayRecord([update]), "metrics": metrics})))
    try:
        arrays, _ = rule.aggregate_train(1, replies)
    except Exception as error:  # noqa: BLE001  # any of them is what the round ends with
        return {"refused": f"{type(error).__name__}: {error}"[:120]}
    mean = arrays.to_numpy_ndarrays()[0]
    finite = bool(np.isfinite(mean).all())
    return {"dtype": str(mean.dtype), "finite": finite, "mean": float(np.nanmean(mean)), "size": mean.size}


def main() -> None:
    kinds = ["plain", "nan", "hundredfold", "other_shape", "one_number", "ten_times_the_size", "int8"]
    kinds += ["claims_a_billion_samples", "negative_samples"]
    rules = {
        "FedAvg": FedAvg(),
        "FedTrimmedAvg": FedTrimmedAvg(beta=0.2),
        "Krum": Krum(num_malicious_nodes=1),
    }
    results = {kind: {name: merged(rule, kind) for name, rule in rules.items()} for kind in kinds}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
