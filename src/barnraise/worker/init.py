"""``barnraise.init``: the session of this process, and the hub whose rounds it takes part in, if any."""

from __future__ import annotations

import os
from typing import Literal

from barnraise.agent_client.metrics.reporter import start_reporter
from barnraise.core.errors import ConfigError, HubError
from barnraise.core.flow.console_log import install_console_log
from barnraise.core.installation import install_hint
from barnraise.planning.inputs.levels import VARIABLE, decode_levels
from barnraise.training.autotune.profiler import is_dry_run
from barnraise.training.autotune.tuner import SyncMode
from barnraise.training.device_placement import count_device_memory, device_of_worker
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import GroupManager
from barnraise.training.group.manager import AgentGroupManager
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.hub.parameter_server import ParameterServer
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointLocations, CheckpointManager
from barnraise.training.sync import Sync

_WISHES: dict[str, SyncMode] = {"exact": "exact", "auto": "auto"}


def init(
    *,
    seed: int = 0,
    unit: int = 0,
    checkpoint_s: float = 60.0,
    copies: int = 2,
    mixed: bool = False,
    base: Literal["equal", "may-differ"] = "equal",
    sync: SyncMode | Sync | None = None,
) -> Session:
    """Return the session of this process.

    ``unit``: samples of one micro-batch (0: an eighth of a batch). Every ``checkpoint_s`` seconds the state
    is saved, on the disks of ``copies`` machines. Machines whose processors compute differently are detected;
    ``mixed`` declares them where only the optimizer differs. ``base``: "may-differ" if the machines store the
    frozen parameters differently; by default their hashes must be equal. ``sync``: "exact"; or "auto", which
    also lets the planner choose codecs and local steps; or a `Sync`. None: as the run was started. In a
    process that ``barnraise join --invite`` started, the hub decides how members synchronize.
    """
    install_console_log()
    start_reporter()
    count_device_memory(device_of_worker())
    if base not in ("equal", "may-differ"):
        raise ConfigError(f"there is no base {base!r}", hint="Take 'equal' or 'may-differ'.")
    place = WorkerId.from_environment()
    is_site = place is not None and bool(os.environ.get("BARNRAISE_SITE"))
    parameter_server = _hub(is_site=is_site) if is_site or os.environ.get("BARNRAISE_HUB") else None
    # The hub has what a site would begin with if all its machines were lost; a checkpoint would be older.
    checkpoints = CheckpointManager(None if is_site else CheckpointLocations.of(place), checkpoint_s, copies)
    named = sync if sync is not None else os.environ.get("BARNRAISE_SYNC") or "exact"
    wish = named if isinstance(named, Sync) else _WISHES.get(named)
    if wish is None:
        raise ConfigError(f"there is no sync {named!r}", hint="Take 'exact', 'auto' or a barnraise.Sync.")
    wish = "exact" if is_dry_run() else wish
    levels = decode_levels(os.environ.get(VARIABLE, ""))
    manager: GroupManager = SingleWorkerManager() if place is None else AgentGroupManager(place, levels)
    return Session(
        manager,
        seed=seed,
        unit=unit,
        checkpoints=checkpoints,
        mixed=mixed,
        base_may_differ=base == "may-differ",
        sync=wish,
        levels=levels,
        parameter_server=parameter_server,
        is_site=is_site,
    )


def _hub(*, is_site: bool) -> ParameterServer | None:
    """Create the client of a hub. Return None on a machine of a site without the packages; another machine
    talks to the hub.
    """
    try:
        from barnraise.worker.hub_adapter import rounds_from_environment, site_rounds_from_environment
    except ModuleNotFoundError as error:
        if is_site:
            return None
        raise HubError(
            f"what a hub needs is not installed here: {error.name}",
            hint=install_hint("hub"),
        ) from error
    return site_rounds_from_environment() if is_site else rounds_from_environment()
