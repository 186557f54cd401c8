"""Variables that the script of a hub gets from the machine of a friend."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.artifacts import FolderManifest
from barnraise.cli.hub.join import JoinedHub, _environment
from barnraise.hub.client.credentials import VARIABLE, MemberCredentials


@pytest.mark.parametrize("device", ["cuda:1", None])
def test_script_gets_what_the_person_chose_and_nothing_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    credentials = MemberCredentials(addresses=("https://hub.test",), hub=bytes(32), key=bytes(32), run="x")
    joined = JoinedHub(tmp_path, tmp_path, ("train.py",), FolderManifest(()), credentials)
    monkeypatch.delenv("BARNRAISE_DEVICE", raising=False)
    if device is not None:
        monkeypatch.setenv("BARNRAISE_DEVICE", device)
    monkeypatch.setenv("BARNRAISE_RUN", "train-abcd")
    monkeypatch.setenv("BARNRAISE_CONTRIBUTING_UPLINK_MBPS", "5")
    variables = _environment(joined)
    assert variables.get("BARNRAISE_DEVICE") == device
    assert variables["BARNRAISE_CONTRIBUTING_UPLINK_MBPS"] == "5"
    assert Path(variables[VARIABLE]).parent == tmp_path
    assert "BARNRAISE_RUN" not in variables
