"""The table of mutations fits the source and the tests."""

from __future__ import annotations

import ast

import pytest

from tests.mutations.places import NotFound, complaints, files_with_tests, place_of, texts
from tests.mutations.table import MUTATIONS, Mutation


def test_mutations_of_the_table_each_have_one_place_and_one_file_for_each_test() -> None:
    assert complaints(MUTATIONS) == []


def test_mutated_modules_can_still_be_read_as_python() -> None:
    """A module that does not compile fails every test, which proves nothing."""
    modules = texts()
    for mutation in MUTATIONS:
        before = modules[place_of(mutation, modules)]
        after = before.replace(mutation.original, mutation.mutated)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), mutation.name


@pytest.mark.parametrize(
    "original", ["a text that stands in no module", "from __future__ import annotations"]
)
def test_mutation_text_found_twice_or_never_is_rejected(original: str) -> None:
    mutation = Mutation("wrong", original, "pass", ("test_no_such_file.py",))
    with pytest.raises(NotFound, match="must stand once in src"):
        place_of(mutation, texts())
    with pytest.raises(NotFound, match="must name one test file, it names none"):
        files_with_tests(mutation)
    assert len(complaints((mutation, mutation))) == 5
