"""Outline of a model: its list of blocks, and which parameters are used before, in and after them.

It comes from one forward pass with tensors that have a shape but no memory. Each parameter belongs to the
part of the pass that uses it. A part that also uses values of an earlier part cannot run on another machine.
Such a model is refused; only the activations between blocks may connect its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from barnraise.core.errors import RunError

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

_BEFORE = -1
_MOST_SHOWN = 8
_OWN_MODEL = "See docs/split.md for the models that can be split."
_OTHER_LIST = 'Name another list, such as blocks="model.layers". ' + _OWN_MODEL


class BlockForm(NamedTuple):
    """Form in which the blocks of a model take and return the activations.

    ``argument``: place or name of the argument. ``length``: of the tuple that a block returns with the
    activations first; 0 if it returns them alone. The rest of the tuple is not used.
    """

    argument: int | str
    length: int

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the activations that a block is called with."""
        taken: torch.Tensor = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        return taken

    def give(self, hidden: torch.Tensor) -> Any:
        """Return the activations as a block returns them."""
        return (hidden, *[None] * (self.length - 1)) if self.length else hidden


class ModelOutline(NamedTuple):
    """Names of the parameters by the part of the forward pass that uses them.

    ``path``: name of the list of blocks. ``dtype`` is that of the activations between blocks.
    ``embeddings``: the outermost modules with parameters that are called before the blocks and only there.
    """

    path: str
    embeddings: tuple[str, ...]
    before: frozenset[str]
    blocks: tuple[frozenset[str], ...]
    after: frozenset[str]
    form: BlockForm
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the activations of the traced micro-batch

    def names(self, first: int, end: int) -> frozenset[str]:
        """Return the parameters that the stage of these blocks uses."""
        names = frozenset().union(*self.blocks[first:end])
        names |= self.before if first == 0 else frozenset()
        return names | (self.after if end == len(self.blocks) else frozenset())


def find_blocks(model: nn.Module, path: str | None = None) -> str:
    """Return the name of the model's list of blocks: the given one, or the longest ``nn.ModuleList``.

    Raise RunError if there is none, or if several lists are equally long.
    """
    lists: dict[str, nn.ModuleList | nn.Sequential] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if path is not None:
        matches = [name for name in lists if name == path or name.endswith(f".{path}")]
        if len(matches) != 1:
            raise RunError(
                f"the model has {len(matches)} lists of blocks called {path}",
                hint=f"Give one of {', '.join(sorted(lists, key=len)[:_MOST_SHOWN]) or 'its own lists'}.",
            )
        return matches[0]
    sizes = {name: len(module) for name, module in lists.items() if isinstance(module, nn.ModuleList)}
    longest = [name for name, size in sizes.items() if size == max(sizes.values(), default=0)]
    if len(longest) != 1 or sizes[longest[0]] < 2:
        found_text = f"has {len(longest)} lists of that length" if len(longest) > 1 else "has no such list"
        raise RunError(
            f"the blocks of the model are not clear: it {found_text}",
            hint='Name the list, for example run.split(..., blocks="model.layers").',
        )
    return longest[0]


def trace_outline(model: nn.Module, path: str, loss: LossFunction, inputs: Any) -> ModelOutline:
    """Run one forward pass of the model without memory, and return its outline.

    ``inputs``: one micro-batch. Raise RunError if the model cannot be split at these blocks. If blocks return
    more than the activations, a second pass shows that the model does without the rest.
    """
    trace = _trace(model, path, loss, inputs, drops_rest=False)
    if trace.has_rest:
        trace = _trace(model, path, loss, inputs, drops_rest=True)
    return trace.outline()


def _trace(model: nn.Module, path: str, loss: LossFunction, inputs: Any, *, drops_rest: bool) -> _Trace:
    trace = _Trace(model, path, drops_rest=drops_rest)
    try:
        with fake_pass(model, loss, inputs, lambda parameter: parameter.is_floating_point()) as (fakes, run):
            trace.names = {id(fake): name for name, fake in fakes.items()}
            with trace.watching(), trace:
                trace.result = run()
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            f"the forward pass of {type(model).__name__} cannot be traced: {error}",
            hint=_trace_hint(error),
        ) from error
    return trace


def _trace_hint(error: Exception) -> str:
    """Return what to do about a forward pass that cannot be traced."""
    is_data_dependent = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if is_data_dependent or "BF16" in str(
        error
    ):  # the sums over experts, which torch traces in bfloat16 only
        return "Build a mixture of experts with experts_implementation='batched_mm'. " + _OWN_MODEL
    return "Call the model on one micro-batch alone, to see if it works without a split. " + _OWN_MODEL


@contextmanager
def fake_pass(
    model: nn.Module, loss: LossFunction, inputs: Any, is_trained: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[dict[str, nn.Parameter], Callable[[], torch.Tensor]]]:
    """Yield parameters without memory by name, and a function that runs a forward pass with them.

    The function returns the loss. ``is_trained``: tells which parameters get gradients.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        # Wrappers of modules register a parameter again only if it is one.
        fakes = {
            name: nn.Parameter(torch.empty(value.shape, dtype=value.dtype), requires_grad=is_trained(value))
            for name, value in model.named_parameters()
        }
        named: dict[str, torch.Tensor] = {f"model.{name}": fake for name, fake in fakes.items()}
        fake_inputs = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
        yield fakes, lambda: functional_call(_WithLoss(model, loss), named, (fake_inputs,))


class _WithLoss(nn.Module):
    """A model together with its loss, so that both are called with other parameters."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, inputs: Any) -> torch.Tensor:
        return self._loss(self.model, inputs)


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the parameters that each part of a forward pass uses.

    The autograd graph shows which parameters the result of a part depends on. Activations are detached where
    a block begins, so a dependence on an earlier part came on another way.
    """

    def __init__(self, model: nn.Module, path: str, *, drops_rest: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[int, str] = {}
        self.result = torch.empty(0)  # the loss
        self._drops_rest = drops_rest
        self._rest: dict[int, torch.Tensor] = {}  # what blocks return beside the activations
        self._model = model
        self._blocks = list(model.get_submodule(path).children())
        self._path = path
        self._part = _BEFORE
        self._used: dict[int, set[str]] = {part: set() for part in range(_BEFORE, len(self._blocks) + 1)}
        self._called: list[int] = []
        self._parts_of: dict[int, set[int]] = {}  # the parts that call each module
        self._argument: int | str = 0
        self._length = 0
        self._forms: set[tuple[tuple[int, ...], torch.dtype]] = set()
        self._last_output: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if any(id(leaf) in self._rest for leaf in leaves):
            raise RunError(
                f"the model uses more than the first value that the blocks of {self._path} return",
                hint="Switch off what uses them, such as a loss of the routers. " + _OWN_MODEL,
            )
        used = (self.names.get(id(leaf)) for leaf in leaves)
        self._used[self._part].update(name for name in used if name is not None)
        return func(*args, **(kwargs or {}))

    @property
    def has_rest(self) -> bool:
        """Return True if a block returns tensors beside the activations."""
        return bool(self._rest)

    def watching(self) -> Hooks:
        """Return a context in which calls of modules are noted."""
        handles = [module.register_forward_pre_hook(self._note_call) for module in self._model.modules()]
        for number, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(self._entering(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leaving(number)))
        return Hooks(handles)

    def _note_call(self, module: nn.Module, args: object) -> None:
        self._parts_of.setdefault(id(module), set()).add(self._part)

    def _entering(self, number: int) -> Callable[..., Any]:
        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if number != len(self._called):
                raise RunError(f"the blocks of {self._path} are not called once, in order", hint=_OTHER_LIST)
            self._called.append(number)
            place: int | str = 0 if args else next(iter(kwargs), 0)
            hidden = args[0] if args else kwargs.get(str(place))
            if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
                raise RunError(f"the first argument of {self._path}.{number} is no tensor", hint=_OTHER_LIST)
            if number > 0 and hidden is not self._last_output:
                raise RunError(
                    f"the model changes the activations between the blocks of {self._path}",
                    hint="Move what happens there into the blocks. " + _OWN_MODEL,
                )
            self._argument = place
            self._forms.add((tuple(hidden.shape), hidden.dtype))
            self._check(hidden, self._part, f"what {self._path}.{number} receives")
            others = [*args[1:], *(value for name, value in kwargs.items() if name != place)]
            for value in tree_leaves(others):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RunError(
                        f"{self._path}.{number} receives a second value that depends on parameters",
                        hint="Compute it inside of the block. " + _OWN_MODEL,
                    )
            self._part = number
            fresh = hidden.detach().requires_grad_()
            return ((fresh, *args[1:]), kwargs) if args else (args, {**kwargs, str(place): fresh})

        return enter

    def _leaving(self, number: int) -> Callable[..., Any]:
        def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            hidden = output[0] if is_tuple else output
            others = output[1:] if is_tuple else ()
            if not isinstance(hidden, torch.Tensor):
                raise RunError(f"what {self._path}.{number} returns begins with no tensor", hint=_OTHER_LIST)
            self._length = len(output) if is_tuple else 0
            self._check(hidden, number, f"what {self._path}.{number} returns")
            self._forms.add((tuple(hidden.shape), hidden.dtype))
            fresh = self._last_output = hidden.detach().requires_grad_()
            self._part = number + 1  # the next block, or what comes after the last one
            if self._drops_rest:
                others = (None,) * len(others)
            tensors = (leaf for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor))
            self._rest.update((id(leaf), leaf) for leaf in tensors)
            return (fresh, *others) if is_tuple else fresh

        return leave

    def _check(self, result: torch.Tensor, part: int, what: str) -> None:
        """Raise RunError if a result depends on a parameter that its part did not use itself."""
        foreign = {self.names.get(id(leaf), "") for leaf in _leaves(result)} - {""} - self._used[part]
        if foreign:
            raise RunError(
                f"{what} depends on {min(foreign)} in another way than through the blocks before",
                hint="Compute it from the activations of the last block. " + _OWN_MODEL,
            )

    def outline(self) -> ModelOutline:
        """Return the outline after the pass."""
        count = len(self._blocks)
        if len(self._called) != count:
            raise RunError(
                f"the forward pass calls {len(self._called)} of the {count} blocks", hint=_OTHER_LIST
            )
        if len(self._forms) > 1:
            raise RunError("the activations do not have one shape between all blocks", hint=_OTHER_LIST)
        self._check(self.result, count, "the loss")
        [(shape, dtype)] = self._forms
        return ModelOutline(
            self._path,
            tuple(self._embeddings(self._model, "")),
            frozenset(self._used[_BEFORE]),
            tuple(frozenset(self._used[number]) for number in range(count)),
            frozenset(self._used[count]),
            BlockForm(self._argument, self._length),
            dtype,
            shape,
        )

    def _embeddings(self, parent: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in parent.named_children():
            has_parameters = any(True for _ in child.parameters())
            if (
                has_parameters
                and self._parts_of.get(id(child)) == {_BEFORE}
                and not self._holds_blocks(child)
            ):
                yield prefix + name
            else:
                yield from self._embeddings(child, f"{prefix}{name}.")

    def _holds_blocks(self, module: nn.Module) -> bool:
        return any(part is self._blocks[0] for part in module.modules())


class Hooks:
    """Context that removes hooks of modules at its end."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _leaves(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors without history from which a result was computed."""
    if result.grad_fn is None:
        yield from [result] if result.requires_grad else []
        return
    seen: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        waiting.extend(function for function, _ in node.next_functions)
