"""lm-evaluation-harness on all machines: a model object answers its requests by ``run.map``.

Every worker builds the same tasks and requests, gets all answers, and computes the metrics. So the numbers
are those of one machine that cuts the requests in the same way, if the processors compute alike.
``python -m barnraise.integrations.lm_eval`` is what ``barnraise eval`` starts on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import barnraise
from barnraise.agent_client.run_options import DataSet
from barnraise.core.errors import RunError
from barnraise.core.names import similar_names
from barnraise.training import Session

Model = TypeVar("Model")

REQUESTS = 32  # in one item of a map
_MODEL = "model"  # its name in a run of ``barnraise eval``
_METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def share(run: Session, model: Model, *, requests_per_item: int = REQUESTS) -> Model:
    """Let all workers of the run answer this model's requests together. Return the same object.

    ``model`` is any object of ``lm_eval.api.model.LM``. Requests of similar length share an item.
    """
    for name in _METHODS:
        setattr(model, name, _shared(run, getattr(model, name), requests_per_item))
    return model


def _shared(run: Session, answer: Callable[..., Sequence[Any]], size: int) -> Callable[..., list[Any]]:
    """Return a function that answers a list of requests with all workers."""
    quiet = {"disable_tqdm": True} if "disable_tqdm" in inspect.signature(answer).parameters else {}

    def answer_all(requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        texts = [repr(request.args) for request in requests]
        order = sorted(range(len(requests)), key=lambda place: (-len(texts[place]), place))
        chunks = [order[first : first + size] for first in range(0, len(order), size)]

        def answer_chunk(item: tuple[int, list[str]]) -> list[Any]:
            return list(answer([requests[place] for place in chunks[item[0]]], **quiet))

        # The texts are compared by the workers, so that all of them answer the same requests.
        items = [(number, [texts[place] for place in chunk]) for number, chunk in enumerate(chunks)]
        answers: list[Any] = [None] * len(requests)
        for chunk, responses in zip(chunks, run.map(answer_chunk, items), strict=True):
            for place, each in zip(chunk, responses, strict=True):
                answers[place] = each
        return answers

    return answer_all


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    """Remove the variables of torch's launcher, from which Accelerate would start a process group."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def evaluate(run: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the tasks, as lm-evaluation-harness reports them."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.registry import get_model
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise RunError(
            f"lm-evaluation-harness cannot be imported: there is no module {error.name}",
            hint="Add `lm_eval[hf]` to the environment of the folder, or install it on each machine.",
        ) from error
    tasks = TaskManager(include_path=options.include_path)
    names = options.tasks.split(",")
    _check_tasks(names, tasks.all_tasks)
    run.map(str, [])  # the workers meet while the launcher's variables are there
    _check_batch_size(options.batch_size, run.world)
    with _without_launcher():
        more = {"batch_size": options.batch_size, "device": str(run.device), **_model_folder(options)}
        _check_model_arguments(options.model_args, more)
        model = get_model(options.kind).create_from_arg_string(options.model_args, more)
        results = simple_evaluate(
            share(run, model, requests_per_item=options.requests),
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            log_samples=False,
            task_manager=tasks,
        )
    if results is None:
        raise RunError("lm-evaluation-harness returned no results", hint="Report this.")
    return {name: results[name] for name in ("results", "versions", "n-shot", "n-samples") if name in results}


def _check_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise RunError if a task does not exist, before the model is loaded. A path of YAML is a task, too."""
    for name in names:
        if name not in known and not name.endswith((".yaml", ".yml")):
            near = similar_names(name, known)
            guess = f"Did you mean {near}?" if near else "List those that exist with: lm_eval ls tasks."
            raise RunError(
                f"there is no task {name!r}", hint=f"{guess} Tasks of your own need --include-path."
            )


def _check_batch_size(size: str, workers: int) -> None:
    """Raise RunError if several workers would each find a batch size of their own."""
    if workers > 1 and size.startswith("auto"):
        raise RunError(
            f"--batch-size {size} finds another size on each device, so the numbers may differ",
            hint="Write a number.",
        )


def _check_model_arguments(text: str, more: Collection[str]) -> None:
    """Raise RunError if the arguments of the model contain one that is set here."""
    for argument in text.split(","):
        name = argument.partition("=")[0].strip()
        if name in more:
            raise RunError(
                f"--model-args must not set {name}",
                hint="Leave it out: --model and --batch-size are options, and each worker has its device.",
            )


def _model_folder(options: argparse.Namespace) -> dict[str, str]:
    """Return the argument for the model that was sent, or that ``--model`` names alone; empty without one."""
    if not options.model and DataSet(_MODEL, is_model=True).variable not in os.environ:
        return {}
    return {"pretrained": barnraise.model_path(_MODEL, alone=options.model)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of an evaluation."""
    parser = argparse.ArgumentParser(prog="barnraise.integrations.lm_eval")
    parser.add_argument("--model")
    parser.add_argument("--kind", default="hf")
    parser.add_argument("--model-args", default="")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--include-path")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--output", default="eval.json")
    return parser.parse_args(arguments)


def main() -> int:
    """Evaluate, print a table on the main worker, and write the results on every machine."""
    options = parse(sys.argv[1:])
    run = barnraise.init()
    results = evaluate(run, options)
    Path(options.output).write_text(json.dumps(results, indent=2, sort_keys=True, default=str) + "\n")
    for task, metrics in sorted(results["results"].items()):
        for name, value in sorted(metrics.items()):
            if isinstance(value, float):
                run.print(f"{task}  {name}  {value:.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
