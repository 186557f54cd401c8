"""What `backyard hub up` refuses before it makes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from backyard.cli.hub import Wishes, up
from backyard.cli.hub_places import top_folder
from backyard.core.config import load_settings
from backyard.core.errors import HubError


def wishes(script: Path, codec: str) -> Wishes:
    return Wishes(
        name="",
        host="",
        port=52480,
        plain=False,
        address=(),
        uses=1,
        round_time="30s",
        codec=codec,
        train=False,
        parent="",
        folder=script.parent,
        script=str(script),
        arguments=(),
    )


@pytest.mark.parametrize("codec", ["nonsense", "powersgd"])
def test_a_codec_that_no_hub_can_use(tmp_path: Path, codec: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match=codec) as caught:
        up(wishes(script, codec))
    assert "int8" in caught.value.hint
    assert not top_folder(load_settings()).exists()
