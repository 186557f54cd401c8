"""Turn an ordinary training script into one that trains in a session, by its syntax tree. Pure.

It knows loops of this form, at the top level or in functions. The inner loop may have its own function::

    for epoch in range(N):
        for x, y in loader:
            loss.backward()
            optimizer.step()

It adds the import, and the session before the loop. It replaces ``range``, ``print`` and ``torch.save``. The
loop over the loader becomes two, over steps and over micro-batches.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from barnraise.core.errors import RunError
from barnraise.environments.script_imports import last_name

_OPTIMIZER_NAMES = """
ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD
"""
_OPTIMIZERS = frozenset(_OPTIMIZER_NAMES.split())
_WRAPPERS = frozenset({"enumerate", "tqdm", "track"})  # of the loader in a `for`
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class AdaptedScript(NamedTuple):
    """The changed script, and remarks about what the person has to check."""

    text: str
    notes: tuple[str, ...]


def adapt_script(text: str) -> AdaptedScript:
    """Return the script with a session. Raise RunError if its loop has another form."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise RunError(f"line {error.lineno}: {error.msg}") from error
    return _Adapter(text, tree).adapt()


def unified_diff(before: str, after: str, path: str) -> str:
    """Return the change of a script as a diff that ``patch`` and ``git apply`` accept."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass
class _Loop:
    """The two loops of a training, the scope of the outer one, and the names in that scope."""

    scope: _Scope
    epochs: ast.For
    batches: ast.For
    model: str
    optimizer: str
    loader: str
    scheduler: str = ""
    is_per_epoch: bool = False  # the scheduler moves once an epoch


@dataclass
class _Edits:
    """Changes of a text: replaced parts of lines, and whole lines before others."""

    lines: list[str]
    replaced: list[tuple[int, int, int, str]] = field(default_factory=list)  # line, start, end, text
    inserted: dict[int, list[str]] = field(default_factory=dict)  # before this line, counted from 1
    indented: Counter[int] = field(default_factory=Counter)  # levels by line

    def replace(self, node: ast.expr, text: str) -> None:
        assert node.end_col_offset is not None
        if node.lineno != node.end_lineno:
            raise RunError(f"line {node.lineno}: an expression over several lines")
        self.replaced.append((node.lineno, node.col_offset, node.end_col_offset, text))

    def insert(self, line: int, *texts: str) -> None:
        self.inserted.setdefault(line, []).extend(texts)

    def text(self) -> str:
        changed = [line.encode() for line in self.lines]  # columns of the tree count bytes
        for line, start, end, text in sorted(self.replaced, reverse=True):
            changed[line - 1] = changed[line - 1][:start] + text.encode() + changed[line - 1][end:]
        lines: list[str] = []
        for number, content in enumerate(changed, 1):
            lines += [f"{text}\n" for text in self.inserted.get(number, [])]
            lines.append("    " * self.indented[number] * bool(content.strip()) + content.decode())
        lines += [f"{text}\n" for text in self.inserted.get(len(changed) + 1, [])]
        return "".join(lines)


class _Adapter:
    def __init__(self, text: str, tree: ast.Module) -> None:
        self._tree = tree
        self._edits = _Edits(text.splitlines(keepends=True))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        self._run = next(name for name in ("run", "session", "barn") if name not in names or name == "barn")
        self._batch = next(
            name
            for name in ("batch", "step_batch", "barn_batch")
            if name not in names or name == "barn_batch"
        )
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._notes: list[str] = []

    def adapt(self) -> AdaptedScript:
        loop = self._find_loop()
        self._add_import()
        self._add_session(loop)
        self._change_range(loop.epochs)
        self._split_loop(loop.batches)
        self._change_output(loop)
        if not loop.scheduler and self._has_scheduler():
            self._notes.append("Give the learning rate scheduler to prepare(), too.")
        return AdaptedScript(self._edits.text(), tuple(self._notes))

    # finding

    def _find_loop(self) -> _Loop:
        inner = [node for node in ast.walk(self._tree) if isinstance(node, ast.For) and _trains(node)]
        inner = [
            node for node in inner if not any(other is not node and _holds(node, other) for other in inner)
        ]
        if not inner:
            raise RunError("it has no `for` loop that calls backward() and optimizer.step()")
        if len(inner) > 1:
            lines = ", ".join(str(node.lineno) for node in inner)
            raise RunError(f"it has several training loops (lines {lines})")
        batches = inner[0]
        loader = _loader_name(batches.iter)
        if loader is None:
            raise RunError(f"line {batches.lineno}: the loop is not over a DataLoader in a variable")
        optimizer = _stepped(batches)
        if len(optimizer) != 1:
            raise RunError(f"line {batches.lineno}: the loop has {len(optimizer)} optimizers, not one")
        self._check_steps(batches, optimizer[0])
        epochs = self._epochs_loop(batches)
        names = {"loader": loader, "optimizer": optimizer[0]}
        if epochs is None:
            function = self._scope(batches)
            epochs, names = self._calling_loop(function, names)
        scope = self._scope(epochs)
        model = self._model_of(scope, names["optimizer"])
        scheduler = self._scheduler_of(scope)
        return _Loop(
            scope,
            epochs,
            batches,
            model,
            names["optimizer"],
            names["loader"],
            scheduler,
            is_per_epoch=any(
                _steps(node, scheduler) and not _holds(batches, node) for node in ast.walk(scope)
            ),
        )

    def _check_steps(self, batches: ast.For, optimizer: str) -> None:
        """Raise RunError if the optimizer does not step for each batch of the loader."""
        for node in ast.walk(batches):
            parent = node
            while _steps(node, optimizer) and parent is not batches:
                parent = self._parents[parent]
                if isinstance(parent, ast.If | ast.While | ast.Try):
                    raise RunError(
                        f"line {node.lineno}: {optimizer}.step() is not called for each batch of the loader"  # type: ignore[attr-defined]
                    )

    def _epochs_loop(self, inner: ast.AST) -> ast.For | None:
        """Return the loop over a range around a node of the same function, or None."""
        node = inner
        while node in self._parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self._parents[node]
            if isinstance(node, ast.For) and _range_of(node.iter) is not None:
                return node
        return None

    def _calling_loop(self, function: _Scope, inside: dict[str, str]) -> tuple[ast.For, dict[str, str]]:
        """Return the epochs' loop that calls the function, and the names of the arguments there."""
        if isinstance(function, ast.Module):
            raise RunError("it has no `for epoch in range(...)` around its training loop")
        calls = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == function.name
            and self._epochs_loop(node) is not None
        ]
        if len(calls) != 1:
            raise RunError(f"no single `for epoch in range(...)` calls {function.name}()")
        epochs = self._epochs_loop(calls[0])
        assert epochs is not None
        return epochs, {role: _argument(calls[0], function, name) for role, name in inside.items()}

    def _scope(self, node: ast.AST) -> _Scope:
        while not isinstance(node, _Scope):
            node = self._parents[node]
        return node

    def _model_of(self, scope: _Scope, optimizer: str) -> str:
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and _targets(node) == [optimizer]:
                called = node.value
                if isinstance(called, ast.Call) and last_name(called.func) in _OPTIMIZERS:
                    for part in ast.walk(called):
                        if isinstance(part, ast.Call) and last_name(part.func) in (
                            "parameters",
                            "named_parameters",
                        ):
                            owner = part.func.value if isinstance(part.func, ast.Attribute) else None
                            if isinstance(owner, ast.Name):
                                return owner.id
        raise RunError(
            f"no line of the form `{optimizer} = torch.optim.NAME(model.parameters(), ...)` was found "
            "beside the loop"
        )

    def _scheduler_of(self, scope: _Scope) -> str:
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                words = ast.unparse(node.value.func).split(".")
                names = _targets(node)
                if len(names) == 1 and ("lr_scheduler" in words or words[-1].endswith("LR")):
                    return names[0]
        return ""

    def _has_scheduler(self) -> bool:
        names = (last_name(node) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute))
        return "lr_scheduler" in names

    # changing

    def _add_import(self) -> None:
        imports = [node for node in self._tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        line = max((node.end_lineno or node.lineno for node in imports), default=0) + 1
        self._edits.insert(line, "import barnraise")

    def _add_session(self, loop: _Loop) -> None:
        margin = " " * loop.epochs.col_offset
        names = [loop.model, loop.optimizer, loop.loader]
        lines = [f"{self._run} = barnraise.init()"]
        if loop.is_per_epoch:
            lines.append(f'{self._run}.track("{loop.scheduler}", {loop.scheduler})')
        elif loop.scheduler:
            names.append(loop.scheduler)
        listed = ", ".join(names)
        lines.append(f"{listed} = {self._run}.prepare({listed})")
        self._edits.insert(loop.epochs.lineno, *(f"{margin}{line}" for line in lines))

    def _change_range(self, epochs: ast.For) -> None:
        call = _range_of(epochs.iter)
        assert call is not None
        if len(call.args) == 1:
            self._edits.replace(call, f"{self._run}.epochs({ast.unparse(call.args[0])})")
            return
        first, last = call.args[:2]
        if len(call.args) == 3 or not isinstance(first, ast.Constant) or not isinstance(first.value, int):
            raise RunError(f"line {call.lineno}: epochs that do not count up from a number by one")
        count = _less(last, first.value)
        self._edits.replace(call, f"({first.value} + epoch for epoch in {self._run}.epochs({count}))")

    def _split_loop(self, loop: ast.For) -> None:
        """Turn the loop over the loader into one over steps, and inside it one over micro-batches."""
        first = loop.body[0]
        if first.lineno == loop.lineno:
            raise RunError(f"line {loop.lineno}: the loop and its body are in one line")
        target = loop.target
        is_counted = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "enumerate"
        if is_counted:
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
                raise RunError(f"line {loop.lineno}: the loop does not name the number and the batch")
            index, target = target.elts
        microbatch = ast.unparse(target).strip("()")
        self._edits.replace(target, self._batch)
        header = f"for {microbatch} in {self._batch}:  # this machine's part; step() takes effect after it"
        self._edits.insert(first.lineno, f"{' ' * first.col_offset}{header}")
        inner = _trained_part(loop, ast.unparse(index) if is_counted else "")
        last = inner[-1].end_lineno or inner[-1].lineno
        texts = {
            line
            for node in ast.walk(loop)
            if isinstance(node, ast.Constant | ast.JoinedStr)
            for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        }
        self._edits.indented.update(line for line in range(first.lineno, last + 1) if line not in texts)
        if any(isinstance(node, ast.AugAssign) for part in inner for node in ast.walk(part)):
            self._notes.append(
                "Sums in the loop (total += ...) now add up micro-batches of one machine. "
                f"For means over all machines, call {self._run}.log(loss=loss) and read {self._run}.history."
            )

    def _change_output(self, loop: _Loop) -> None:
        """Print and save on one worker only, where the session can be named."""
        elsewhere = 0
        after = loop.epochs.lineno
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
                continue
            called = ast.unparse(node.value.func)
            if called not in ("print", "torch.save"):
                continue
            if self._scope(node) is not loop.scope or node.lineno < after:
                elsewhere += self._scope(node) is not loop.scope
            elif called == "print":
                self._edits.replace(node.value.func, f"{self._run}.print")
            else:
                self._guard(node)
        if elsewhere:
            self._notes.append(
                "Functions that print or save do so on every machine. You see the output of one of them."
            )

    def _guard(self, node: ast.Expr) -> None:
        assert node.end_lineno is not None
        line = self._edits.lines[node.lineno - 1]
        if line[: node.col_offset].strip():
            raise RunError(f"line {node.lineno}: several statements in one line")
        self._edits.insert(node.lineno, f"{' ' * node.col_offset}if {self._run}.is_main:")
        self._edits.indented.update(range(node.lineno, node.end_lineno + 1))


def _trains(loop: ast.For) -> bool:
    called = {last_name(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)}
    return {"backward", "step"} <= called


def _trained_part(loop: ast.For, index: str) -> list[ast.stmt]:
    """Return the statements of a loop that each micro-batch needs.

    What follows the optimizer's step and reports by the number of the batch belongs to the step.
    """
    called = [
        {last_name(node.func) for node in ast.walk(part) if isinstance(node, ast.Call)} for part in loop.body
    ]
    end = max(place for place, names in enumerate(called) if names & {"backward", "step", "zero_grad"}) + 1
    while end < len(loop.body):
        part = loop.body[end]
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        if (isinstance(part, ast.If) and index in names) or "print" in names:
            break
        end += 1
    return loop.body[:end]


def _steps(node: ast.AST, name: str) -> bool:
    """Return True for the call ``name.step(...)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="step")):
            return owner == name
    return False


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return outer is not inner and any(node is inner for node in ast.walk(outer))


def _stepped(loop: ast.For) -> list[str]:
    """Return the optimizers that a loop steps: those whose gradients it also sets to zero."""
    zeroed, stepped = set(), []
    for node in ast.walk(loop):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if not isinstance(owner, ast.Name):
            continue
        if node.func.attr == "zero_grad":
            zeroed.add(owner.id)
        elif node.func.attr == "step" and owner.id not in stepped:
            stepped.append(owner.id)
    return [name for name in stepped if name in zeroed] or [
        name for name in stepped if "sched" not in name.lower()
    ]


def _loader_name(iterated: ast.expr) -> str | None:
    if isinstance(iterated, ast.Name):
        return iterated.id
    if isinstance(iterated, ast.Call) and last_name(iterated.func) in _WRAPPERS and iterated.args:
        return _loader_name(iterated.args[0])
    return None


def _range_of(iterated: ast.expr) -> ast.Call | None:
    """Return the call of ``range`` in ``range(...)``, ``tqdm(range(...))`` and so on."""
    if not isinstance(iterated, ast.Call) or not iterated.args:
        return None
    if last_name(iterated.func) == "range" and not iterated.keywords:
        return iterated
    if last_name(iterated.func) in _WRAPPERS:
        return _range_of(iterated.args[0])
    return None


def _argument(call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return the variable that a call gives to a parameter; a global variable has the same name there."""
    parameters = [parameter.arg for parameter in function.args.args]
    if name not in parameters:
        return name
    place = parameters.index(name)
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is None and place < len(call.args):
        given = call.args[place]
    if not isinstance(given, ast.Name):
        raise RunError(f"line {call.lineno}: the argument {name} of {function.name}() is not a variable")
    return given.id


def _less(value: ast.expr, amount: int) -> str:
    """Return an expression for ``value - amount``, simplified if value is a sum with that number."""
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return str(value.value - amount)
    match value:
        case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=added)) if added == amount:
            return ast.unparse(left)
    return ast.unparse(value) if amount == 0 else f"{ast.unparse(value)} - {amount}"


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
