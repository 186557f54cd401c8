"""Names and texts stay readable: the numbers of ``python -m tests.arch.signage`` are kept at zero."""

from __future__ import annotations

from tests.arch import signage

ALL_PATHS = ["src/barnraise", "lab", "examples", "benchmarks", "tests"]


def test_folders_have_few_modules() -> None:
    assert signage.folder_findings() == []


def test_public_classes_have_names_of_their_own() -> None:
    assert signage.class_findings() == []
    assert len(signage.SHARED_CLASS_NAMES) <= 10


def test_standard_terms_occur_in_names() -> None:
    assert signage.term_findings() == []


def test_unit_test_files_are_named_after_modules() -> None:
    assert signage.unit_test_file_findings() == []


def test_names_of_tests_say_subject_and_outcome() -> None:
    assert signage.name_of_test_findings() == []


def test_docstrings_follow_the_rules() -> None:
    assert signage.docstring_findings(ALL_PATHS) == []


def test_values_have_names_that_say_what_they_hold() -> None:
    assert signage.local_name_findings(ALL_PATHS) == []


def test_comments_and_texts_use_plain_words() -> None:
    assert signage.text_findings(ALL_PATHS) == []
