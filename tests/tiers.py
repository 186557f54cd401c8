"""The tiers of the checks: a table that says where each test runs. The first row that fits a test decides.

A tier holds all tests of the tiers before it: ``fast``, ``gate``, ``deep``. A test that no row names is
fast, or of the gate if it carries the marker ``slow`` or ``lab``. Most rows come from measured
durations; the rows for whole folders of tests with processes are a judgement.

Others move and rename test files: `tests/arch/test_development.py` notices a row that names no test any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

TIERS = ("fast", "gate", "deep")
_TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    tier: Literal["fast", "gate", "deep"]
    file: str  # below tests; * stands for anything, also for several folders
    test: str = "*"  # the function's name
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # parameters and their values
    marked: str = ""  # only tests with this marker
    fixture: str = ""  # only tests that use this fixture


TABLE = (
    # The record of runs: a day of steps, and twenty kills.
    Row("deep", "unit/history/logs/test_compaction.py", "test_record_of_a_day_*", {"steps_per_s": (10,)}),
    Row("gate", "unit/history/logs/test_compaction.py", "test_record_of_a_day_*"),
    Row("deep", "failure/test_record_kills.py"),
    Row("deep", "failure/test_metrics.py"),
    # Split models: one architecture stands for the others.
    Row(
        "gate",
        "unit/training/pipeline/test_outline.py",
        "test_stages_with_*",
        {"kind": ("Llama",)},
    ),
    Row("deep", "unit/training/pipeline/test_outline.py"),
    Row("deep", "unit/training/pipeline/passes/test_activations.py", marked="slow"),
    # The lab: a few tests of each kind; each one costs 5 to 60 s.
    Row("fast", "lab/test_lab_parts.py"),
    Row("deep", "lab/test_systems.py", "test_arm64_host_computes_with_torch"),
    Row("deep", "lab/test_systems.py", "test_torch_finds_our_backend*"),
    Row("gate", "lab/test_systems.py"),
    Row("gate", "lab/test_lab.py", "test_cut_and_heal"),
    Row("gate", "lab/test_lab.py", "test_nat_dials_out_and_cannot_be_dialled"),
    Row("gate", "lab/test_lab.py", "test_nothing_is_left_behind", {"ending": ("kill",)}),
    Row("gate", "lab/test_discovery.py", "test_machines_of_one_cluster_find_each_other_and_no_others"),
    Row("gate", "lab/test_wire.py", "test_four_machines_agree_over_encrypted_links"),
    Row("gate", "lab/test_wire.py", "test_unplugged_machine_is_lost_and_others_continue"),
    Row("gate", "lab/test_cluster.py", "test_coordinator_that_dies_or_stops_is_replaced_and_readmitted"),
    Row("gate", "lab/test_cluster.py", "test_codes_and_roles"),
    Row("gate", "lab/test_runs.py", "test_every_machine_works_and_the_result_comes_back"),
    Row("gate", "lab/test_runs.py", "test_run_continues_without_dead_machine"),
    Row("gate", "lab/test_progress.py", "test_build_of_an_environment_is_announced_and_followed"),
    Row("gate", "lab/test_session.py", "test_killed_workers_come_back_and_nothing_changes"),
    Row("gate", "lab/test_map.py", "test_killed_workers_come_back_*"),
    Row("gate", "lab/test_limits.py", "test_paused_machine_leaves_a_session_and_comes_back"),
    Row(
        "gate",
        "lab/test_attacks.py",
        where={"attack": ("lan-guess-code", "guest-decides", "guest-starts-run", "owner-signs-for-others")},
    ),
    Row("gate", "lab/test_transcript.py", "test_readme_shows_*"),
    Row("gate", "lab/test_transcript.py", "test_readme_links_*"),
    Row("deep", "lab/*"),
    # Numerics: our backend, groups of one and three, the common dtypes. Gloo is the control.
    Row("deep", "numerics/*", where={"pool": ("gloo",)}),
    Row("gate", "numerics/test_training.py", "test_ddp_matches_single_process", {"world": (3,)}),
    Row("gate", "numerics/test_training.py", "test_fsdp2_matches_single_process", {"world": (2,)}),
    Row("gate", "numerics/test_algorithms.py", "test_small_operations_match_expectation", {"world": (3,)}),
    Row("deep", "numerics/*", marked="slow"),
    Row("deep", "numerics/*", where={"world": (4, 5)}),
    Row("fast", "numerics/test_harness.py"),
    Row("gate", "numerics/*"),
    Row("deep", "fuzz/test_parsers.py", "test_mutated_input_*"),
    Row("gate", "fuzz/*"),
    # Simulations: see --one-seed-in.
    Row("deep", "sim/test_commit.py", where={"block": tuple(range(2, 10))}),
    Row("deep", "sim/test_membership.py", "test_two_hundred_form_a_view"),
    Row("deep", "sim/test_membership.py", "test_random_schedules_ten_thousand_*"),
    Row("deep", "sim/test_removed_owner.py", "test_removed_owner_in_ten_thousand_*"),
    Row("gate", "sim/test_membership.py", marked="slow"),
    Row("fast", "sim/test_membership.py"),
    Row("gate", "sim/*"),
    # Failures of real processes.
    Row("deep", "failure/test_hostile.py"),
    Row("gate", "failure/test_sweep.py", "test_sweep_survives_a_killed_worker_and_killed_agents"),
    Row("deep", "failure/test_sweep.py"),
    Row("deep", "failure/test_leaving.py", "test_thousand_group_rebuilds_leak_no_resources"),
    Row("deep", "failure/test_watch.py"),
    Row("deep", "failure/test_notify.py"),
    Row("deep", "failure/test_report.py"),
    Row("gate", "failure/test_queue.py", "test_jobs_run_one_per_device_*"),
    Row("deep", "failure/test_queue.py"),
    Row("deep", "failure/test_page.py"),
    Row("deep", "failure/test_split.py"),
    Row("gate", "failure/*"),
    # Whole programs, and real waits of many seconds.
    Row("gate", "benchmarks/test_page.py", "test_update_with_many_machines_*"),
    Row("deep", "benchmarks/test_page.py"),
    Row("gate", "benchmarks/test_hub_attacks.py", where={"attack": ("friend-sends-poison",)}),
    Row("deep", "benchmarks/test_hub_attacks.py"),
    Row("deep", "unit/cli/*test_self_test.py"),
    Row("deep", "unit/integrations/test_session_trainer_run.py"),
    Row("deep", "unit/display/notebook/test_live.py", "test_display_follows_a_run_*"),
    Row("deep", "unit/display/notebook/test_live.py", "test_closed_display_*"),
    Row("deep", "unit/display/notebook/test_widget.py"),
    Row("deep", "unit/agent/containers/test_run.py", "test_containers_do_not_outlive_run"),
    Row("deep", "arch/test_lanes.py", where={"case": ("a thread stays behind",)}),
    Row("deep", "unit/environments/test_builder.py", "test_package_on_the_index_of_torch_*"),
    Row("deep", "unit/environments/test_builder.py", "test_built_environment_prefers_the_lock_*"),
    Row("deep", "unit/training/test_session_groups.py", "test_arithmetic_probe_distinguishes_processors"),
    Row("deep", "unit/training/test_session_examples.py", marked="slow"),
    Row("deep", "unit/training/test_session_devices.py"),
    Row(
        "deep",
        "unit/collectives/torch_patch/test_init_process_group.py",
        "test_unmodified_script_prints_same_output_as_torchrun",
        {"script": ("fsdp2_training.py", "accelerate_training.py", "lightning_training.py")},
    ),
    Row("deep", "unit/hub/server/test_server_proxies.py", where={"site": ("caddy", "caddy-hidden")}),
    Row("deep", "unit/hub/server/test_server_proxies.py", "test_friend_joins_trains_and_leaves_*"),
    Row("deep", "unit/cli/test_uninstall.py", "test_uninstall_of_a_machine_with_an_agent_*"),
    Row("deep", "unit/collectives/comm_process/test_process.py", "test_links_to_removed_machine_*"),
    Row("deep", "unit/training/group/test_sites.py", "test_rounds_across_sites_give_same_state"),
    Row("deep", "unit/hub/server/test_server_crashes.py"),
    Row("deep", "unit/hub/region/*"),
    Row("deep", "unit/hub/server/test_server_proxies.py", "test_longest_poll_is_answered_through_proxy"),
    Row("deep", "unit/hub/server/test_upload_slots.py", "test_eight_slow_members_do_not_stop_honest_one"),
    Row("deep", "unit/cli/*test_site.py"),
    Row("deep", "unit/cli/runs/test_export.py", marked="slow"),
    Row("deep", "unit/cli/test_hub_store.py"),
    Row("deep", "unit/cli/test_main_cluster.py"),
    Row("deep", "unit/hub/*test_health.py", marked="slow"),
    Row("deep", "unit/cli/test_main_hub.py"),
    Row("deep", "unit/cli/test_main_settings.py"),
    Row("deep", "unit/hub/*test_clock*.py", marked="slow"),
    Row("gate", "unit/hub/*test_uploader.py", "test_members_download_committed_blobs_from_store"),
    Row("deep", "unit/hub/*test_uploader.py", fixture="scene"),
    # Hubs: many tests wait for a server, a deadline or a process. Together they cost the fast tier most.
    Row("gate", "unit/hub/*"),
    Row("gate", "unit/collectives/torch_patch/*"),
    Row("gate", "unit/discovery/test_mdns.py"),
    Row("gate", "arch/test_lanes.py"),
    Row("gate", "unit/cli/*hub*.py"),
    # Many threads or processes with torch in them.
    Row("gate", "unit/checkpoint/*test_sharded.py"),
    Row("deep", "unit/compression/test_allreduce_groups.py"),
    Row("gate", "unit/training/*"),
    # Servers, sockets and waits, 3 to 10 s for a file.
    Row("gate", "unit/agent_client/test_client.py"),
    Row("gate", "unit/agent_client/test_kv_client.py"),
    Row("gate", "unit/runs/test_rendezvous.py"),
    Row("gate", "unit/collectives/test_cluster_store.py"),
    Row("gate", "unit/artifacts/transfer/test_swarm_scheduler.py"),
    Row("gate", "unit/transport/control/test_dial.py"),
    Row("gate", "unit/agent/checkpoints/test_replicator.py"),
    # Processes that start an interpreter for each test.
    Row("gate", "unit/agent/runs/test_supervisor_client.py"),
    Row("gate", "unit/agent/runs/test_variables.py"),
    Row("gate", "unit/environments/test_builder.py"),
    Row("gate", "unit/environments/test_installed_packages.py"),
    Row("gate", "unit/agent/test_artifact_service.py"),
    Row("gate", "unit/agent/test_model_files.py"),
    Row("gate", "unit/agent/supervisor/*"),
    Row("deep", "unit/integrations/trackers/*", "test_feeder_that_is_killed_*"),
    Row("fast", "unit/integrations/trackers/test_schedule.py"),
    Row("gate", "unit/integrations/*"),
    Row("gate", "unit/worker/*"),
    Row("gate", "unit/testing/test_simulation_page.py"),
)

# Most tests in these folders wait for sockets, processes or clocks: they get the marker ``clocks``.
WAITING = (
    "contract/*",
    "unit/agent/*",
    "unit/cli/*",
    "unit/discovery/*",
    "unit/hub*",
    "unit/agent_client/*",
    "unit/integrations/test_optuna.py",
    "unit/page/test_*.py",
    "unit/rpc/*",
    "unit/testing/*",
    "unit/transport/*",
    "unit/worker/*",
)


def waits(item: pytest.Item) -> bool:
    """Say whether the table gives this test the marker ``clocks``."""
    return any(fnmatchcase(_file(item.path), pattern) for pattern in WAITING)


def tier_of(item: pytest.Item) -> str:
    """Return the first tier that runs this test."""
    for row in _rows_of(item.path):
        if _fits(row, item):
            return row.tier
    is_slow = any(item.get_closest_marker(name) is not None for name in ("slow", "lab"))
    return "gate" if is_slow else "fast"


@cache
def tier_of_file(path: Path) -> str:
    """Return the first tier that may run a test of this file: earlier tiers need not even import it."""
    tiers = []
    for row in _rows_of(path):
        tiers.append(row.tier)
        if row == Row(row.tier, row.file):  # fits every test that is left
            return min(tiers, key=TIERS.index)
    return "fast"


@cache
def _rows_of(path: Path) -> tuple[Row, ...]:
    return tuple(row for row in TABLE if fnmatchcase(_file(path), row.file))


@cache
def _file(path: Path) -> str:
    return path.relative_to(_TESTS).as_posix() if _TESTS in path.parents else ""


def _fits(row: Row, item: pytest.Item) -> bool:
    given = getattr(getattr(item, "callspec", None), "params", {})
    return (
        fnmatchcase(getattr(item, "originalname", None) or item.name, row.test)
        and all(name in given and given[name] in values for name, values in row.where.items())
        and (not row.marked or item.get_closest_marker(row.marked) is not None)
        and (not row.fixture or row.fixture in getattr(item, "fixturenames", ()))
    )
