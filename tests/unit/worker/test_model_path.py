"""Places of a model: in a run and alone, and the errors if there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import barnraise
from barnraise.core.errors import RunError, ShippingError
from tests.unit.artifacts.models.caches import MODEL, write_cache


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BARNRAISE_MODEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("BARNRAISE_LAUNCHED", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


def test_model_path_in_a_run_is_what_the_agent_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    monkeypatch.setenv("BARNRAISE_MODEL_BASE", "/store/data/abcd")
    assert barnraise.model_path("base", alone=tmp_path) == "/store/data/abcd"


def test_model_path_in_a_run_without_that_model_names_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    monkeypatch.setenv("BARNRAISE_MODEL_TEACHER", "/x")
    with pytest.raises(RunError, match="without a model base; it has teacher") as caught:
        barnraise.model_path("base", alone=tmp_path)
    assert "barnraise run --model base=FOLDER SCRIPT" in caught.value.hint


def test_model_path_alone_is_the_variable_or_the_given_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert barnraise.model_path("base", alone=tmp_path) == str(tmp_path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BARNRAISE_MODEL_BASE", "./other")
    assert barnraise.model_path("base", alone=tmp_path) == str(tmp_path / "other")


def test_model_path_alone_finds_an_id_in_the_own_cache(tmp_path: Path) -> None:
    with pytest.raises(ShippingError, match="is not in the Hugging Face cache"):
        barnraise.model_path("base", alone=MODEL)
    write_cache(tmp_path / "cache", MODEL, {"config.json": b"{}"})
    assert os.listdir(barnraise.model_path("base", alone=MODEL)) == ["config.json"]


def test_model_path_without_anything_says_what_to_do() -> None:
    with pytest.raises(RunError, match="given no model base") as caught:
        barnraise.model_path("base")
    assert "barnraise run --model base=FOLDER SCRIPT" in caught.value.hint
    assert "BARNRAISE_MODEL_BASE=FOLDER" in caught.value.hint


@pytest.mark.parametrize("name", ["", "../up", "a b", "x" * 41, "9"])
def test_model_path_of_a_wrong_name_is_an_error(name: str) -> None:
    with pytest.raises(RunError, match="is not the name of a model"):
        barnraise.model_path(name)


def test_model_path_of_an_absent_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_MODEL_BASE", "./no/such/folder")
    with pytest.raises(RunError, match="there is no folder of model base at"):
        barnraise.model_path("base")
