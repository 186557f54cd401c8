"""Settings: typed, validated, and traceable to the place that gave each value.

An explicit argument beats the environment (``BARNRAISE_SECTION_KEY``), which beats the TOML file, which
beats the default. ``docs/settings.md`` says what each setting means (a test checks that none is missing).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import platformdirs
from msgspec import Meta

from barnraise.core.errors import ConfigError

ENVIRONMENT_PREFIX = "BARNRAISE_"
CONFIG_VARIABLE = "BARNRAISE_CONFIG"

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=604_800)]
Text = Annotated[str, Meta(min_length=1)]


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of addresses, ports and encryption."""

    port: Port = 52416
    discovery_port: Port = 52415
    connect_timeout_s: Seconds = 5.0
    retries: Annotated[int, Meta(ge=0, le=1000)] = 3
    encryption: Literal["tls", "plaintext"] = "tls"
    streams: Annotated[int, Meta(ge=0, le=16)] = 0
    addresses: tuple[Text, ...] = ()
    peers: tuple[Text, ...] = ()


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of heartbeats and timeouts of a link."""

    heartbeat_s: Seconds = 1.0
    silence_s: Seconds = 5.0


Strategy = Literal["auto", "ring", "tree", "doubling", "exchange", "direct", "star", "sites", "plain"]
RootedStrategy = Literal["auto", "ring", "tree", "direct", "star", "sites", "plain"]
BlockStrategy = Literal["auto", "ring", "doubling", "direct"]
Arity = Annotated[int, Meta(ge=2, le=64)]
TreeBelow = Annotated[int, Meta(ge=0)]
# Strategies that may build a tree, so that an arity has an effect.
TREE_STRATEGIES = frozenset({"auto", "plain", "tree", "sites"})


class AllReduceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of each all-reduce. None: as for all operations."""

    strategy: Strategy | None = None
    arity: Arity | None = None
    tree_below_bytes: TreeBelow | None = None


class ReduceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of each reduce. None: as for all operations."""

    strategy: RootedStrategy | None = None
    arity: Arity | None = None
    tree_below_bytes: TreeBelow | None = None


class BroadcastSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of each broadcast. None: as for all operations."""

    strategy: RootedStrategy | None = None
    arity: Arity | None = None
    tree_below_bytes: TreeBelow | None = None


class BlockSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all-gather or of reduce-scatter. None: as for all operations."""

    strategy: BlockStrategy | None = None


class CollectiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of collective operations such as all-reduce."""

    strategy: Strategy = "auto"
    arity: Arity = 2
    tree_below_bytes: TreeBelow = 1024 * 1024
    timeout_s: Seconds = 1800.0
    segment_bytes: Annotated[int, Meta(ge=1024, le=1024 * 1024)] = 1024 * 1024
    staging: Literal["host", "refuse"] = "host"
    arena_bytes: Annotated[int, Meta(ge=1024 * 1024)] = 1024 * 1024 * 1024
    cost_latency_us: Annotated[float, Meta(gt=0, le=1e8)] | None = None
    cost_bandwidth_mbps: Annotated[float, Meta(gt=0, le=1e8)] | None = None
    all_reduce: AllReduceSettings = AllReduceSettings()
    reduce: ReduceSettings = ReduceSettings()
    broadcast: BroadcastSettings = BroadcastSettings()
    all_gather: BlockSettings = BlockSettings()
    reduce_scatter: BlockSettings = BlockSettings()


class TrustSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of trust for a machine without a cluster, which has no trust log."""

    nodes: tuple[Text, ...] = ()
    secret_file: Text | None = None


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the files that a run sends and keeps."""

    most_bytes: Annotated[int, Meta(ge=1, le=1 << 44)] = 1 << 30
    most_files: Annotated[int, Meta(ge=1, le=50_000)] = 20_000
    most_data_bytes: Annotated[int, Meta(ge=1, le=1 << 44)] = 1 << 40
    store_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 50 << 30
    log_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 32 << 20
    history_bytes: Annotated[int, Meta(ge=16 << 20, le=1 << 40)] = 500 << 20
    stop_grace_s: Seconds = 10.0
    data_paths: tuple[Text, ...] = ()
    huggingface_cache: Text | None = None
    energy_price: Text | None = None


class ContributorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a hub's run on this machine's uplink and time of day."""

    uplink_mbps: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    metered: Literal["wait", "allow"] = "wait"
    quiet_hours: Text | None = None


class HostingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the hubs that this machine serves."""

    unsigned_mbps: Annotated[float, Meta(ge=0, le=1e6)] = 2.0
    forwarded: Literal["ignore", "believe"] = "ignore"
    proxy_token: Annotated[str, Meta(min_length=16, max_length=200, pattern="^[A-Za-z0-9_-]+$")] | None = None


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the metrics that this machine serves to Prometheus."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the page that the agent serves on this machine."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 0


class NotificationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of notifications about runs that this machine started."""

    stalled_s: Seconds = 300.0


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Places of this machine's key and local sockets."""

    directory: Text | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings by section. ``load_settings`` returns checked ones."""

    network: NetworkSettings = NetworkSettings()
    link: LinkSettings = LinkSettings()
    collectives: CollectiveSettings = CollectiveSettings()
    trust: TrustSettings = TrustSettings()
    runs: RunSettings = RunSettings()
    contributing: ContributorSettings = ContributorSettings()
    hosting: HostingSettings = HostingSettings()
    metrics: MetricsSettings = MetricsSettings()
    page: PageSettings = PageSettings()
    notifications: NotificationSettings = NotificationSettings()
    state: StateSettings = StateSettings()


class ResolvedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and for each dotted name the source of its value."""

    settings: Settings
    origins: Mapping[str, str]


class _Given(msgspec.Struct, frozen=True):
    value: object
    origin: str
    # Text from the environment may stand for a number; a value from a file must have the right type already.
    from_text: bool = False
    # A relative path in a file is meant from that file; elsewhere it is meant from the working directory.
    base: Path | None = None


# A section inside another one comes after it.
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "network": NetworkSettings,
    "link": LinkSettings,
    "collectives": CollectiveSettings,
    "collectives.all_reduce": AllReduceSettings,
    "collectives.reduce": ReduceSettings,
    "collectives.broadcast": BroadcastSettings,
    "collectives.all_gather": BlockSettings,
    "collectives.reduce_scatter": BlockSettings,
    "trust": TrustSettings,
    "runs": RunSettings,
    "contributing": ContributorSettings,
    "hosting": HostingSettings,
    "metrics": MetricsSettings,
    "page": PageSettings,
    "notifications": NotificationSettings,
    "state": StateSettings,
}
_TYPES: Mapping[str, Any] = {
    f"{section}.{key}": hint
    for section, struct in _SECTIONS.items()
    for key, hint in get_type_hints(struct, include_extras=True).items()
    if f"{section}.{key}" not in _SECTIONS
}
_PATHS = frozenset({"trust.secret_file", "state.directory", "runs.huggingface_cache"})
_VARIABLES: Mapping[str, str] = {ENVIRONMENT_PREFIX + name.replace(".", "_").upper(): name for name in _TYPES}


def strategy_name(name: str) -> str:
    """Return the own name of a strategy: the star has two other ones."""
    return "star" if name in ("centralised", "centralized") else name


def setting_names() -> tuple[str, ...]:
    """Return every setting with its section, such as ``network.port``, in the order of the documentation."""
    return tuple(_TYPES)


def default_config_path() -> Path:
    """Return the file to read if neither an argument nor BARNRAISE_CONFIG names one."""
    return Path(platformdirs.user_config_dir("barnraise", appauthor=False)) / "config.toml"


def load_settings(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Return the effective settings.

    ``overrides`` has keys such as ``network.port``; see ``resolve_settings``.
    """
    return resolve_settings(path, environ, overrides).settings


def resolve_settings(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> ResolvedSettings:
    """Return the effective settings and the source of each.

    Raise ConfigError with the source of a value that is wrong.
    """
    variables = os.environ if environ is None else environ
    given = {
        **_from_file(path, variables),
        **_from_environment(variables),
        **_from_overrides(overrides or {}),
    }
    values = {name: _convert(name, item) for name, item in given.items()}
    settings = _build(values)
    origins = {name: given[name].origin if name in given else "default" for name in _TYPES}
    _check_together(settings, origins)
    return ResolvedSettings(settings=settings, origins=origins)


def state_path(settings: Settings) -> Path:
    """Return the place of the state directory, which may not exist yet."""
    if settings.state.directory is not None:
        return Path(settings.state.directory)
    return Path(platformdirs.user_state_dir("barnraise", appauthor=False))


def state_directory(settings: Settings) -> Path:
    """Return the directory of the node key and the local socket.

    Create it with mode 0700 if it is missing.
    """
    directory = state_path(settings)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the state directory {directory} cannot be made: {error.strerror or error}",
            hint="Choose a directory inside your home directory, in [state] directory or "
            "BARNRAISE_STATE_DIRECTORY.",
        ) from error
    return directory


def _build(values: Mapping[str, object]) -> Settings:
    built: dict[str, Any] = {}
    for section, struct in reversed(_SECTIONS.items()):  # inner sections first
        inner = {_key(name): each for name, each in built.items() if _section(name) == section}
        own = {_key(name): value for name, value in values.items() if _section(name) == section}
        built[section] = struct(**inner, **own)
    return Settings(**{section: built[section] for section in Settings.__struct_fields__})


def _section(name: str) -> str:
    return name.rpartition(".")[0]


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _from_file(path: Path | None, variables: Mapping[str, str]) -> dict[str, _Given]:
    chosen = path
    if chosen is None and variables.get(CONFIG_VARIABLE):
        chosen = Path(variables[CONFIG_VARIABLE]).expanduser()
    required = chosen is not None
    file = chosen or default_config_path()
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ConfigError(
            f"the settings file {file} does not exist",
            hint="Create it, or correct the path that was given (by an argument or BARNRAISE_CONFIG).",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings file {file} cannot be read: {error}",
            hint="Make it a UTF-8 text file that you may read.",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the settings file {file} is not valid TOML: {error}",
            hint="Correct the line named above.",
        ) from error
    return {name: _Given(value, str(file), base=file.parent) for name, value in _flatten(document, str(file))}


def _from_environment(variables: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for variable, text in variables.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = _VARIABLES.get(variable)
        if name is not None:
            given[name] = _Given(text, f"${variable}", from_text=True)
        elif _looks_like_a_setting(variable):
            raise ConfigError(
                f"the environment variable {variable} is not a setting",
                hint=f"Unset it{_did_you_mean(variable, list(_VARIABLES))}.",
            )
    return given


def _looks_like_a_setting(variable: str) -> bool:
    """Return True if the variable is in one of our sections, or a likely typing error of one.

    Other programs may own other BARNRAISE_ variables.
    """
    section = variable.removeprefix(ENVIRONMENT_PREFIX).partition("_")[0].lower()
    return section in _SECTIONS or bool(difflib.get_close_matches(variable, list(_VARIABLES), cutoff=0.85))


def _from_overrides(overrides: Mapping[str, object]) -> dict[str, _Given]:
    nested = {key: value for key, value in overrides.items() if "." not in key}
    dotted = {key: value for key, value in overrides.items() if "." in key}
    for name in dotted:
        if name not in _TYPES:
            raise ConfigError(
                f"the argument names the unknown setting {name!r}",
                hint=f"Use a name of docs/settings.md{_did_you_mean(name, list(_TYPES))}.",
            )
    return {
        name: _Given(value, "argument") for name, value in (*_flatten(nested, "argument"), *dotted.items())
    }


def _flatten(document: Mapping[str, object], place: str) -> Iterator[tuple[str, object]]:
    """Yield ``("network.port", 1)`` for ``{"network": {"port": 1}}``; raise ConfigError for unknown names."""
    for section, table in document.items():
        if section not in _SECTIONS:
            raise ConfigError(
                f"{place} has the unknown section [{section}]",
                hint=f"Remove it{_did_you_mean(section, list(_SECTIONS))}.",
            )
        yield from _flatten_section(section, table, place)


def _flatten_section(section: str, table: object, place: str) -> Iterator[tuple[str, object]]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{place}: {section!r} must be a section of settings, not a value",
            hint=f"Write [{section}] on a line of its own and the settings below it.",
        )
    for key, value in table.items():
        name = f"{section}.{key}"
        if name in _SECTIONS:
            yield from _flatten_section(name, value, place)
        elif name in _TYPES:
            yield name, value
        else:
            known = [_key(each) for each in (*_TYPES, *_SECTIONS) if _section(each) == section]
            raise ConfigError(
                f"{place}: [{section}] has the unknown setting {key!r}",
                hint=f"Remove it{_did_you_mean(str(key), known)}.",
            )


def _did_you_mean(word: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f", or correct it to {matches[0]!r}" if matches else ""


def _convert(name: str, given: _Given) -> object:
    hint = _TYPES[name]
    value = given.value
    if given.from_text and isinstance(value, str):
        value = _read_text(name, value)
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name.endswith(".strategy") and isinstance(value, str):
        value = strategy_name(value)
    try:
        converted: object = msgspec.convert(value, hint, strict=not given.from_text)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason = _plain(str(error)) if isinstance(error, msgspec.ValidationError) else "it is not valid text"
        if choices := _choices(hint):
            reason = f"expected one of {', '.join(choices)}"
        raise ConfigError(f"{name} ({given.origin}) has the wrong value {given.value!r}: {reason}") from error
    if name in _PATHS and isinstance(converted, str):
        location = Path(converted).expanduser()
        return str(Path(os.path.abspath((given.base or Path()) / location)))
    return converted


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the words that a setting may be, or none if it is not a choice of words."""
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return get_args(literals[0]) if literals else ()


def _read_text(name: str, text: str) -> object:
    """Parse the text of an environment variable.

    Commas separate the values of a list. Empty text means an empty list or no value.
    """
    hint = _TYPES[name]
    if hint == tuple[Text, ...]:
        return [part.strip() for part in text.split(",") if part.strip()]
    optional = type(None) in get_args(hint)
    return None if optional and not text.strip() else text.strip()


def _plain(message: str) -> str:
    return message.replace("`", "").replace(" - at $", ", at item ").replace("Expected", "expected")


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    """Check rules between settings.

    Each message names both settings and their sources.
    """

    def fail(sentence: str, first: str, second: str, hint: str) -> None:
        raise ConfigError(
            f"{sentence} ({first}: {origins[first]}; {second}: {origins[second]})",
            hint=hint,
        )

    network, link, collectives = settings.network, settings.link, settings.collectives
    if network.port == network.discovery_port:
        fail(
            f"port and discovery_port are both {network.port}",
            "network.port",
            "network.discovery_port",
            "Give them different numbers.",
        )
    if link.silence_s < 2 * link.heartbeat_s:
        fail(
            f"silence_s is {link.silence_s:g}, less than two heartbeats of {link.heartbeat_s:g} s",
            "link.silence_s",
            "link.heartbeat_s",
            "Raise silence_s or lower heartbeat_s; otherwise one late heartbeat ends a healthy link.",
        )
    if collectives.arena_bytes < 2 * collectives.segment_bytes:
        fail(
            "arena_bytes holds less than two segments",
            "collectives.arena_bytes",
            "collectives.segment_bytes",
            "Raise arena_bytes or lower segment_bytes.",
        )
    for operation in ("all_reduce", "reduce", "broadcast"):
        _check_tree(collectives, operation, fail)
    if (collectives.cost_latency_us is None) != (collectives.cost_bandwidth_mbps is None):
        fail(
            "only one of cost_latency_us and cost_bandwidth_mbps is given",
            "collectives.cost_latency_us",
            "collectives.cost_bandwidth_mbps",
            "Give both, or neither to have the links measured.",
        )


def _check_tree(
    collectives: CollectiveSettings, operation: str, fail: Callable[[str, str, str, str], None]
) -> None:
    """Check that settings of a tree have an effect on this operation."""
    own: AllReduceSettings | ReduceSettings | BroadcastSettings = getattr(collectives, operation)
    strategy = own.strategy or collectives.strategy
    place = f"collectives.{operation}"
    source = f"{place}.strategy" if own.strategy else "collectives.strategy"
    if own.arity is not None and strategy not in TREE_STRATEGIES:
        fail(
            f"the strategy {strategy!r} of {operation} builds no tree, so its arity would have no effect",
            f"{place}.arity",
            source,
            f"Remove the arity, or choose one of {', '.join(sorted(TREE_STRATEGIES))}.",
        )
    if own.tree_below_bytes is not None and strategy != "plain":
        fail(
            f"the strategy {strategy!r} of {operation} does not look at tree_below_bytes",
            f"{place}.tree_below_bytes",
            source,
            f'Write strategy = "plain" in [{place}], or remove tree_below_bytes.',
        )
