from __future__ import annotations

import os
import re
import stat
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core import config
from barnraise.core.config import Settings, load_settings, resolve_settings, setting_names, state_directory
from barnraise.core.errors import ConfigError
from tests.repository import ROOT

DOCUMENT = ROOT / "docs" / "settings.md"


def write(directory: Path, text: str) -> Path:
    file = directory / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "default_config_path", lambda: tmp_path / "absent" / "config.toml")


def test_load_settings_without_sources_returns_defaults() -> None:
    settings = load_settings(environ={})
    assert settings == Settings()
    assert (settings.network.port, settings.network.discovery_port) == (52416, 52415)
    assert (settings.network.retries, settings.network.connect_timeout_s) == (3, 5.0)
    assert (settings.collectives.tree_below_bytes, settings.collectives.timeout_s) == (1 << 20, 1800.0)
    assert settings.network.encryption == "tls"


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[network]\nport = 1001\nretries = 7\nstreams = 2\n")
    resolved = resolve_settings(
        file,
        {"BARNRAISE_NETWORK_PORT": "1002", "BARNRAISE_NETWORK_RETRIES": "8"},
        {"network.port": 1003},
    )
    network = resolved.settings.network
    assert (network.port, network.retries, network.streams) == (1003, 8, 2)
    assert network.connect_timeout_s == 5.0
    assert resolved.origins["network.port"] == "argument"
    assert resolved.origins["network.retries"] == "$BARNRAISE_NETWORK_RETRIES"
    assert resolved.origins["network.streams"] == str(file)
    assert resolved.origins["network.connect_timeout_s"] == "default"


def test_environment_names_config_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[link]\nsilence_s = 9\n")
    assert load_settings(environ={"BARNRAISE_CONFIG": str(file)}).link.silence_s == 9.0


def test_section_inside_a_section_comes_from_all_sources(tmp_path: Path) -> None:
    text = '[collectives]\nstrategy = "ring"\n[collectives.reduce]\nstrategy = "tree"\narity = 3\n'
    file = write(tmp_path, text)
    variables = {
        "BARNRAISE_COLLECTIVES_REDUCE_ARITY": "4",
        "BARNRAISE_COLLECTIVES_ALL_REDUCE_STRATEGY": "plain",
    }
    nested = {"collectives": {"broadcast": {"strategy": "star"}}}
    for more in (nested, {"collectives.broadcast.strategy": "star"}):
        chosen = load_settings(file, variables, more).collectives
        assert (chosen.strategy, chosen.reduce.strategy, chosen.reduce.arity) == ("ring", "tree", 4)
        assert (chosen.all_reduce.strategy, chosen.broadcast.strategy) == ("plain", "star")
        assert chosen.all_gather.strategy is None


@pytest.mark.parametrize("name", ["star", "centralised", "centralized"])
def test_star_has_three_names(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, f'[collectives]\nstrategy = "{name}"\n[collectives.reduce]\nstrategy = "{name}"\n')
    chosen = load_settings(file, {"BARNRAISE_COLLECTIVES_BROADCAST_STRATEGY": name}).collectives
    assert {chosen.strategy, chosen.reduce.strategy, chosen.broadcast.strategy} == {"star"}


def test_overrides_may_be_nested() -> None:
    assert load_settings(environ={}, overrides={"network": {"port": 7}}).network.port == 7


@pytest.mark.parametrize(
    ("variable", "text", "section", "key", "value"),
    [
        ("BARNRAISE_TRUST_NODES", "a, b,", "trust", "nodes", ("a", "b")),
        ("BARNRAISE_TRUST_NODES", "", "trust", "nodes", ()),
        ("BARNRAISE_NETWORK_ADDRESSES", "10.0.0.1", "network", "addresses", ("10.0.0.1",)),
        ("BARNRAISE_TRUST_SECRET_FILE", "", "trust", "secret_file", None),
        ("BARNRAISE_LINK_SILENCE_S", " 7.5 ", "link", "silence_s", 7.5),
        ("BARNRAISE_NETWORK_ENCRYPTION", "plaintext", "network", "encryption", "plaintext"),
    ],
)
def test_environment_text_becomes_typed_value(
    variable: str, text: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_settings(environ={variable: text}), section), key) == value


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[netwrk]\nport = 1\n", r"unknown section \[netwrk\][\s\S]*'network'"),
        ("[network]\nprt = 1\n", r"\[network\] has the unknown setting 'prt'[\s\S]*'port'"),
        ("network = 3\n", "must be a section"),
        ('[network]\nport = "52416"\n', r"network\.port .*expected int, got str"),
        ("[network]\nport = 0\n", r"network\.port .*expected int >= 1"),
        ("[network]\nport = 70000\n", r"network\.port .*<= 65535"),
        ("[network]\nport = true\n", r"network\.port .*expected int, got bool"),
        ("[network]\nconnect_timeout_s = 0\n", r"network\.connect_timeout_s .*> 0"),
        ("[network]\nconnect_timeout_s = nan\n", r"network\.connect_timeout_s"),
        ("[link]\nsilence_s = inf\n", r"link\.silence_s"),
        ("[network]\nretries = -1\n", r"network\.retries .*>= 0"),
        ("[network]\nstreams = -1\n", r"network\.streams .*>= 0"),
        ('[network]\nencryption = "none"\n', r"network\.encryption .*one of tls, plaintext"),
        ('[network]\naddresses = ["10.0.0.1", ""]\n', r"network\.addresses .*item \[1\]"),
        ('[collectives]\nstrategy = "rng"\n', r"collectives\.strategy .*auto, ring, tree"),
        ('[collectives.broadcast]\nstrategy = "doubling"\n', r"broadcast\.strategy .*auto, ring, tree, dir"),
        ("[collectives.all_gather]\narity = 3\n", r"all_gather\] has the unknown setting 'arity'"),
        ("[collectives.all_reduc]\narity = 3\n", r"unknown setting 'all_reduc'[\s\S]*'all_reduce'"),
        ("[collectives]\nreduce = 3\n", r"'collectives\.reduce' must be a section"),
        (
            '[collectives.reduce]\narity = 3\nstrategy = "ring"\n',
            r"'ring' of reduce builds no tree.*collectives\.reduce\.arity: .*collectives\.reduce\.strategy: ",
        ),
        (
            '[collectives]\nstrategy = "star"\n[collectives.reduce]\narity = 3\n',
            r"'star' of reduce builds no tree.*collectives\.strategy: ",
        ),
        ("[collectives.all_reduce]\ntree_below_bytes = 5\n", r"'auto' of all_reduce does not look at"),
        ("[collectives]\narity = 1\n", r"collectives\.arity .*>= 2"),
        ("[collectives]\nsegment_bytes = 2097152\n", r"collectives\.segment_bytes .*<= 1048576"),
        ("[collectives]\ncost_latency_us = 100\n", "only one of cost_latency_us and cost_bandwidth_mbps"),
        ("[network]\nport = 52415\n", r"both 52415.*network\.discovery_port: default"),
        ("[link]\nsilence_s = 1\n", r"two heartbeats.*link\.heartbeat_s: default"),
        ("[network\n", "not valid TOML"),
        ('[trust]\nnodes = "abc"\n', r"trust\.nodes .*expected array, got str"),
    ],
)
def test_wrong_value_in_file_names_file(tmp_path: Path, text: str, pattern: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.hint.endswith(".")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BARNRAISE_NETWORK_PORT", "many"),
        ("BARNRAISE_NETWORK_PORT", ""),
        ("BARNRAISE_NETWORK_PRT", "1"),
        ("BARNRAISE_NETWROK_PORT", "1"),
        ("BARNRAISE_COLLECTIVES_ARITY", "1"),
        ("BARNRAISE_LINK_SILENCE_S", "nan"),
    ],
)
def test_wrong_value_in_environment_names_variable(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load_settings(environ={variable: text})


def test_other_environment_variables_are_ignored() -> None:
    assert load_settings(environ={"BARNRAISE_SWING": "red", "PATH": "/bin"}) == Settings()


def test_unknown_override_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"network\.prt"):
        load_settings(environ={}, overrides={"network.prt": 1})


def test_named_config_file_must_exist_and_be_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(tmp_path / "nothing.toml", {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "bytes.toml", {})


def test_relative_path_in_file_is_relative_to_that_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[trust]\nsecret_file = "keys/secret"\n')
    assert load_settings(file, {}).trust.secret_file == str(tmp_path / "keys" / "secret")


def test_home_directory_in_path_is_expanded() -> None:
    settings = load_settings(environ={"BARNRAISE_STATE_DIRECTORY": "~/by"})
    assert settings.state.directory == str(Path.home() / "by")


def test_state_directory_is_private_to_owner(tmp_path: Path) -> None:
    settings = load_settings(environ={"BARNRAISE_STATE_DIRECTORY": str(tmp_path / "a" / "b")})
    directory = state_directory(settings)
    assert directory == tmp_path / "a" / "b"
    assert directory.is_dir()
    if sys.platform != "win32":
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert state_directory(settings) == directory


def test_state_directory_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = load_settings(environ={"BARNRAISE_STATE_DIRECTORY": str(tmp_path / "file" / "state")})
    with pytest.raises(ConfigError, match="cannot be made"):
        state_directory(settings)


@given(st.sampled_from(setting_names()), st.text(st.characters(exclude_characters="\0"), max_size=20))
def test_any_environment_text_gives_settings_or_config_error(name: str, text: str) -> None:
    variable = "BARNRAISE_" + name.replace(".", "_").upper()
    message = ""
    try:
        load_settings(environ={variable: text})
    except ConfigError as error:
        message = str(error)
    assert not message or name in message


def test_every_setting_is_documented_with_its_default() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    documented = {}
    headed = re.compile(r"^## \[([\w.]+)\]\n(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
    for section, body in headed.findall(text):
        for key, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", body, flags=re.MULTILINE):
            documented[f"{section}.{key}"] = default.strip()
    assert tuple(documented) == setting_names()
    for name, shown in documented.items():
        value = attrgetter(name)(Settings())
        expected = {None: "not set", (): "empty"}.get(value, f"`{value}`")
        assert shown == expected, name


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings().network.port = 1  # type: ignore[misc]


def test_default_config_path_is_in_home_of_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert config.default_config_path().name == "config.toml"
    assert (
        os.fspath(Path.home()) in os.fspath(config.default_config_path()) or "XDG_CONFIG_HOME" in os.environ
    )
