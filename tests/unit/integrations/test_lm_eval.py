"""Models of lm-evaluation-harness whose requests all workers answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from barnraise.core.errors import RunError
from barnraise.integrations.lm_eval import (
    _check_batch_size,
    _check_model_arguments,
    _check_tasks,
    evaluate,
    parse,
    share,
)
from barnraise.training import Session
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.integrations.evaluation_files import write_model, write_tasks
from tests.unit.training.threaded_group import ThreadWorker, run_workers


@dataclass
class Request:
    """Request as lm-evaluation-harness makes it."""

    args: tuple[Any, ...]


class Letters:
    """Model whose answers follow from the text; it notes how many requests it has answered."""

    def __init__(self) -> None:
        self.answered = 0

    def loglikelihood(self, requests: list[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.answered += len(requests)
        return [
            (-float(len(context)), context < answer) for context, answer in (each.args for each in requests)
        ]

    def loglikelihood_rolling(self, requests: list[Request]) -> list[float]:
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests: list[Request]) -> list[str]:
        return [request.args[0][::-1] + str(request.args[1]["until"]) for request in requests]


REQUESTS = [Request(("x" * (number * 7 % 23), f"answer {number}")) for number in range(50)]
TEXTS = [Request((f"{number}" * (number % 4), {"until": ["\n"], "do_sample": False})) for number in range(20)]


def answers(worker: Any) -> tuple[list[Any], int]:
    run = Session(worker, seed=0, unit=0, checkpoints=CheckpointManager(None, 60.0, 1))
    model = share(run, Letters(), requests_per_item=4)
    responses = [
        model.loglikelihood(REQUESTS),
        model.loglikelihood_rolling(REQUESTS),
        model.generate_until(TEXTS),
    ]
    return responses, model.answered


def test_shared_model_answers_as_the_model_itself() -> None:
    plain = Letters()
    expected = [
        plain.loglikelihood(REQUESTS),
        plain.loglikelihood_rolling(REQUESTS),
        plain.generate_until(TEXTS),
    ]
    responses, answered = answers(SingleWorkerManager())
    assert responses == expected
    assert answered == len(REQUESTS)


def test_argument_that_a_worker_sets_is_refused_by_its_name() -> None:
    _check_model_arguments("dtype=float32,revision=main", ("pretrained", "device"))
    with pytest.raises(RunError, match="must not set pretrained"):
        _check_model_arguments("dtype=float32,pretrained=gpt2", ("pretrained", "device"))


def test_batch_size_that_each_worker_would_choose_is_refused() -> None:
    _check_batch_size("auto", 1)
    _check_batch_size("8", 3)
    with pytest.raises(RunError, match="--batch-size auto:4 finds another size on each device"):
        _check_batch_size("auto:4", 2)


def test_unknown_task_is_refused_with_similar_names() -> None:
    known = ["choose", "write"]
    _check_tasks(["choose", "own/task.yaml"], known)
    with pytest.raises(RunError, match="there is no task 'chose'") as caught:
        _check_tasks(["write", "chose"], known)
    assert caught.value.hint.startswith("Did you mean choose?")
    with pytest.raises(RunError) as caught:
        _check_tasks(["mmlu_of_mine"], known)
    assert "--include-path" in caught.value.hint


def test_workers_answer_each_request_once_and_get_all_answers() -> None:
    def member(worker: ThreadWorker) -> tuple[list[Any], int]:
        return answers(worker)

    members = run_workers(2, member)
    assert members[0][0] == members[1][0] == answers(SingleWorkerManager())[0]
    assert sum(answered for _, answered in members) == len(REQUESTS)


def test_options_of_an_evaluation_have_defaults() -> None:
    options = parse(["--tasks", "mine,other", "--limit", "10"])
    assert (options.model, options.kind, options.tasks) == (None, "hf", "mine,other")
    assert (options.limit, options.requests) == (10.0, 32)


@pytest.mark.slow
def test_real_evaluation_has_the_numbers_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local tasks and a small model; it runs where ``lm_eval[hf]`` is installed. See also tests/lab."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    tasks, model = write_tasks(tmp_path, 45), write_model(tmp_path)
    run = Session(SingleWorkerManager(), seed=0, unit=0, checkpoints=CheckpointManager(None, 60.0, 1))
    words = [
        "--model",
        str(model),
        "--tasks",
        "choose,write",
        "--include-path",
        str(tasks),
        "--requests",
        "4",
    ]
    shared = evaluate(run, parse(words))["results"]
    plain = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "device": "cpu", "batch_size": 1},
        tasks=["choose", "write"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )["results"]
    assert shared["choose"]["acc,none"] == plain["choose"]["acc,none"]
    assert shared["write"]["exact_match,none"] == plain["write"]["exact_match,none"]
    assert 0.1 < shared["choose"]["acc,none"] < 0.9
