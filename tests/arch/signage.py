"""Count what makes the code hard to read, and list it: ``python -m tests.arch.signage [--list] [PATH ...]``.

The last line is one JSON object. ``tests/arch/test_signage.py`` keeps every number at zero. CONTRIBUTING.md
has the rules and the glossary.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.arch.source_tree import ROOT, SOURCE

MAX_MODULES = 12
MAX_WORDS = 25
MIN_WORDS = 4
PACKAGE = SOURCE / "barnraise"

# Two classes may share a name only for a reason that is written here.
SHARED_CLASS_NAMES: dict[str, str] = {}

# Words of the field that a new reader searches for: each is in the name of a module, package or class.
STANDARD_TERMS = (
    "aggregation",
    "consensus",
    "coordinator",
    "election",
    "heartbeat",
    "parameter server",
    "prefetch",
    "process group",
    "queue",
    "quorum",
    "rate limit",
    "retry",
    "scheduler",
    "snapshot",
    "state transfer",
    "supervisor",
    "throttle",
)

# Words that stand for people, metaphors of earlier versions, and verbs that the field does not use.
_BANNED_WORDS = """
who whom whoever whomever nobody somebody everybody anybody someone everyone anew mend mends mended
mending nursery nurse nursed newcomer newcomers warden wardens doorkeeper knock knocks knocking
mover movers crew besieged befall betimes thereof wherever whatever whichever
"""
BANNED_WORDS = frozenset(_BANNED_WORDS.split())
BANNED_PHRASES = ("for ever", "is said", "ended well", "by and by", "so many", "of its own accord", "in vain")
_BAD_STARTS = """
of what who whom whose whether how where when why which that those these if
"""
BAD_STARTS = frozenset(_BAD_STARTS.split())

_VERBS = """
abort accept accumulate acquire adapt add admit advance advertise agree aggregate allocate allow
announce answer append apply approve arm ask assemble assert assign attach attempt authenticate
await balance ban begin benchmark bind block bound broadcast build buffer cache calculate call
cancel cap carry catch change check choose classify clean clear clip close collect combine commit
compare compile complete compress compute concatenate configure confirm connect construct consume
continue contribute control convert copy correct count cover create cut deal decide declare decline
decode decompress decrypt deduct deduplicate defer define delay delegate delete deliver deny derive
describe deserialize destroy detach detect determine dial discard disable discover dispatch display
distribute divide do download drain draw drop dump emit empty enable encode encrypt end enforce
enqueue ensure enter estimate evaluate evict exchange exclude execute exit expand expect expire
explain export expose extend extract fail feed fetch fill filter find finish fire fit fix flatten
flush fold follow force forget fork format forward free freeze gather generate get give go grant
group grow guard guess halt handle hash have hold host identify ignore import include increase index
inform inherit initialize insert inspect install interpolate interpret interrupt introduce invoke
issue iterate join judge keep kill label launch lease leave let limit link list listen load locate
lock log look lower make manage map mark match measure merge migrate mirror modify monitor mount
move multiply name negotiate normalize note notify number observe offer omit open order overwrite
pack pair park parse partition pass patch pause perform permit pick pin ping place plan poll pop
post predict prefer prefetch prepare print probe process produce profile promise propagate propose
protect prove provide prune publish pull purge push put query queue raise randomize rank rate reach
read rearrange rebuild receive recompute reconcile reconfigure reconnect record recover reduce refer
refill refresh refuse register reject relay release reload rely remember remove rename render reopen
repeat replace replay reply report represent request require reroute rescale reserve reset resend
resize resolve respond restart restore restrict resume retire retrieve retry return reuse reverse
revert revoke rewrite ring roll rotate round route run sample sanitize save scale scan schedule
search seed select send separate serialize serve set settle share shift show shrink shut shuffle
sign signal simulate skip sleep solve sort spawn split spread stage stamp start stop store stream
strip submit subscribe subtract sum supervise supply suspend swap switch sync synchronize tag take
tell terminate test throttle time tokenize track train transfer transform translate transmit
traverse treat trim truncate try turn type undo unflatten uninstall unlink unlock unpack unregister
unwrap update upgrade upload use validate verify view visit vote wait wake walk warn watch weigh
withdraw wrap write yield zero
"""
VERBS = frozenset(_VERBS.split())


# Names of values that say nothing about the value. They are participles, pronouns or superlatives.
_EMPTY_NAMES = """
found said told came mine one most least fewest so_many so_far gone asked
"""
EMPTY_NAMES = frozenset(_EMPTY_NAMES.split())


class Finding(NamedTuple):
    """One place that breaks a rule."""

    rule: str
    place: str
    text: str


def python_files(paths: list[str]) -> list[Path]:
    """Return the Python files below these paths of the repository, without generated ones."""
    files = [
        file
        for path in paths
        for file in ([ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py")))
    ]
    return [file for file in files if "__pycache__" not in file.parts]


def _sentences(text: str) -> list[str]:
    """Split a docstring into sentences; code, lists and tables count little or not at all."""
    plain = re.sub(r"``[^`]*``|`[^`]*`", "code", text)
    prose = []
    for paragraph in re.split(r"\n\s*\n", plain):
        if paragraph.rstrip().endswith("::"):
            paragraph = paragraph.rstrip()[:-2] + "."
        lines = paragraph.splitlines()
        if (
            len(lines) > 1
            and all(line.startswith("    ") for line in lines[1:])
            and lines[0].startswith("    ")
        ):
            continue  # an indented block is code
        if any(line.strip().startswith(("|", ">>>")) for line in lines):
            continue
        block: list[str] = []
        if not any(re.match(r"\s*([-*]|\d+\.)\s", line) for line in lines):
            lines = [line for line in lines if not line.startswith("  ")]  # an example, or a table
        for line in lines:
            if re.match(r"\s*([-*]|\d+\.)\s", line) and block:
                prose.append(" ".join(block))
                block = []
            block.append(re.sub(r"^\s*([-*]|\d+\.)\s", "", line).strip())
        prose.append(" ".join(block))
    return [part for piece in prose for part in re.split(r"(?<=[.!?])[\")]?\s+", piece) if part.strip()]


def _words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9][\w'/.-]*", sentence)


def _docstring_findings(file: Path) -> Iterator[Finding]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    is_test = "tests" in file.relative_to(ROOT).parts[:1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line = node.body[0].lineno
        place = f"{file.relative_to(ROOT)}:{line}"
        first = _sentences(text)[0] if _sentences(text) else ""
        words = _words(first)
        if len(words) < MIN_WORDS and not isinstance(node, ast.Module):
            yield Finding("too short", place, first)
        if words and words[0].lower() in BAD_STARTS:
            yield Finding("bad start", place, first)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and not is_test and words and words[0].lower() not in VERBS:
            yield Finding("not imperative", place, first)
        lowered = [word.lower().rstrip(".'") for sentence in _sentences(text) for word in _words(sentence)]
        for word in sorted(BANNED_WORDS.intersection(lowered)):
            yield Finding("banned word", place, f"{word}: {first}")
        for phrase in BANNED_PHRASES:
            if f" {phrase} " in f" {' '.join(lowered)} ":
                yield Finding("banned phrase", place, f"{phrase}: {first}")
        for sentence in _sentences(text):
            if len(_words(sentence)) > MAX_WORDS:
                yield Finding("long sentence", place, f"{len(_words(sentence))} words: {sentence}")


def docstring_findings(paths: list[str]) -> list[Finding]:
    """Return every docstring below these paths that breaks a rule of style."""
    return [finding for file in python_files(paths) for finding in _docstring_findings(file)]


def local_name_findings(paths: list[str]) -> list[Finding]:
    """Return the variables and parameters whose names do not say what they hold."""
    findings = []
    for file in python_files(paths):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name, line = node.id, node.lineno
            elif isinstance(node, ast.arg):
                name, line = node.arg, node.lineno
            else:
                continue
            if name.lstrip("_") in EMPTY_NAMES:
                findings.append(Finding("empty name", f"{file.relative_to(ROOT)}:{line}", name))
    return findings


def text_findings(paths: list[str]) -> list[Finding]:
    """Return the comments and texts with words that stand for people or come from earlier versions."""
    findings = []
    for file in python_files(paths):
        if file == Path(__file__):
            continue  # it lists the words
        place = file.relative_to(ROOT)
        with file.open("rb") as source:
            for token in tokenize.tokenize(source.readline):
                is_text = token.type == tokenize.STRING and " " in token.string.strip()
                if token.type != tokenize.COMMENT and not is_text:
                    continue
                for word in sorted(BANNED_WORDS.intersection(re.findall(r"[a-z]+", token.string.lower()))):
                    line = token.string.strip().splitlines()[0]
                    findings.append(
                        Finding("banned word in text", f"{place}:{token.start[0]}", f"{word}: {line}")
                    )
    return findings


def folder_findings(roots: tuple[Path, ...] = (PACKAGE, ROOT / "benchmarks")) -> list[Finding]:
    """Return the folders that hold more modules than a reader can survey."""
    counts: Counter[Path] = Counter()
    for root in roots:
        for file in root.rglob("*.py"):
            if file.name != "__init__.py":
                counts[file.parent] += 1
    return [
        Finding("full folder", str(folder.relative_to(ROOT)), f"{count} modules")
        for folder, count in sorted(counts.items())
        if count > MAX_MODULES
    ]


def class_findings() -> list[Finding]:
    """Return the public class names that more than one class has."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(PACKAGE)))
    return [
        Finding("shared class name", name, ", ".join(files))
        for name, files in sorted(homes.items())
        if len(files) > 1 and name not in SHARED_CLASS_NAMES
    ]


def _name_words(name: str) -> str:
    """Return a name in snake or camel case as words in lower case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower()


def term_findings() -> list[Finding]:
    """Return the standard terms that no module, package or class is named after."""
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        names += [_name_words(part) for part in file.relative_to(PACKAGE).with_suffix("").parts]
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names.append(_name_words(node.name))
    return [
        Finding("missing term", term, "in no name of a module or class")
        for term in STANDARD_TERMS
        if not any(term in name for name in names)
    ]


def _tests_a_module(test: Path) -> bool:
    """Tell whether a unit test file is named after a module, or after a module and one of its aspects."""
    folder = PACKAGE / test.parent.relative_to(ROOT / "tests" / "unit")
    words = test.stem.removeprefix("test_").split("_")
    for end in range(len(words), 0, -1):
        name = "_".join(words[:end])
        if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
            return True
    return False


def unit_test_file_findings() -> list[Finding]:
    """Return the unit test files that are named after no module."""
    return [
        Finding("test of no module", str(file.relative_to(ROOT)), "")
        for file in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if not _tests_a_module(file)
    ]


def name_of_test_findings() -> list[Finding]:
    """Return the tests whose names do not say subject, condition and outcome."""
    findings = []
    for file in python_files(["tests"]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith(
                "test_"
            ):
                continue
            words = node.name.split("_")[1:]
            place = f"{file.relative_to(ROOT)}:{node.lineno}"
            if len(words) < 3:
                findings.append(Finding("short test name", place, node.name))
            elif words[0] in ("the", "a", "an") or words[0] in BAD_STARTS or BANNED_WORDS.intersection(words):
                findings.append(Finding("test name", place, node.name))
    return findings


def main() -> None:
    """Print the numbers, and with --list every place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "paths", nargs="*", default=["src/barnraise", "lab", "benchmarks", "examples", "tests"]
    )
    parser.add_argument("--list", action="store_true", help="print every place that breaks a rule")
    options = parser.parse_args()
    findings = docstring_findings(options.paths)
    findings += local_name_findings(options.paths) + text_findings(options.paths)
    findings += folder_findings() + class_findings() + term_findings() + unit_test_file_findings()
    findings += name_of_test_findings()
    if options.list:
        for finding in findings:
            if finding.rule in ("full folder", "shared class name", "missing term") or any(
                finding.place.startswith(path.rstrip("/")) for path in options.paths
            ):
                print(f"{finding.place}: {finding.rule}: {finding.text}")
    counts = Counter(finding.rule for finding in findings)
    print(json.dumps(dict(sorted(counts.items()))))


if __name__ == "__main__":
    main()
