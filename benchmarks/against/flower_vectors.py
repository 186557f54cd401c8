r"""Write the results of Flower's own merge rules as test vectors for our merge rules.

    flower/bin/python -m benchmarks.against.flower_vectors \
        tests/unit/hub/aggregation/reference/flower_merges.json

Needs flwr 1.42.0 and numpy only (`benchmarks.against.flower` prints how to create an environment for them).
The updates are float32 numbers; JSON holds each of them exactly. `krum` names the update that the rule chose,
`multikrum` is the merge of the three best updates.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import flwr  # type: ignore[import-not-found]
import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.serverapp.strategy import (  # type: ignore[import-not-found]
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
)

_TRIMS = (0.1, 0.2, 0.25, 0.4)
_COORDINATES = 7


@dataclass
class Reply:
    """Stand-in for a Flower message, with the fields that a merge rule reads.

    A real message can be made only within a run of Flower.
    """

    content: Any

    def has_error(self) -> bool:
        return False


def merged(rule: Any, updates: np.ndarray, samples: list[int]) -> list[float]:
    replies = []
    for update, count in zip(updates, samples, strict=True):
        metrics = MetricRecord({"num-examples": count})
        content = RecordDict({"arrays": ArrayRecord([update]), "metrics": metrics})
        replies.append(Reply(content))
    arrays, _ = rule.aggregate_train(1, replies)
    return [float(value) for value in arrays.to_numpy_ndarrays()[0]]


def case(name: str, updates: np.ndarray, samples: list[int], hostile: int) -> dict[str, Any]:
    updates = updates.astype(np.float32)
    chosen = merged(Krum(num_malicious_nodes=hostile), updates, samples)
    distances = np.abs(updates - np.array(chosen, np.float32)).sum(axis=1)
    return {
        "name": name,
        "updates": [[float(value) for value in update] for update in updates],
        "samples": samples,
        "hostile": hostile,
        "weighted_mean": merged(FedAvg(), updates, samples),
        "median": merged(FedMedian(), updates, samples),
        "trimmed_mean": {str(cut): merged(FedTrimmedAvg(beta=cut), updates, samples) for cut in _TRIMS},
        "krum": int(distances.argmin()),
        "multikrum": merged(MultiKrum(num_malicious_nodes=hostile, num_nodes_to_select=3), updates, samples),
    }


def main() -> None:
    random = np.random.default_rng(7)
    common = random.normal(0, 1e-2, _COORDINATES)

    def honest(count: int) -> np.ndarray:
        return common + random.normal(0, 2e-3, (count, _COORDINATES))

    flipped, large, noise = honest(20), honest(20), honest(20)
    flipped[15:] *= -1
    large[[1, 4, 9, 16]] *= 100
    noise[:5] = random.normal(0, 1, (5, _COORDINATES))
    equal = np.repeat(honest(1), 6, axis=0)
    cases = [
        case("five honest", honest(5), [10, 20, 30, 40, 50], 0),
        case("even number", honest(6), [1, 1, 1, 1, 1, 1], 1),
        case("all equal", equal, [3, 1, 4, 1, 5, 9], 1),
        case("a quarter flipped", flipped, list(range(1, 21)), 5),
        case("a fifth a hundredfold", large, [8] * 20, 4),
        case("a quarter noise", noise, list(range(20, 0, -1)), 5),
    ]
    made = {"made_by": f"flwr {flwr.__version__}, numpy {np.__version__}", "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
