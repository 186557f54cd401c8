"""Catalogue of all series. docs/metrics.md has the same table, and a test compares the two. Pure.

Labels have few values: runs and workers of this machine, machines of the cluster, and words of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from barnraise.core.metrics.series import Series

# From a 4 KiB operation on loopback (50 microseconds) to a large model on a home uplink (minutes).
_OPERATION = (
    *(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_STEP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RECOVERY = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
_HUB = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_agent = partial(Series, source="agent")
_device = partial(Series, source="device", own_labels=("device", "model"))
_worker = partial(Series, source="worker")
_comm = partial(Series, source="communication")
_hub = partial(Series, source="hub")

# Agent

AGENT_INFO = _agent(
    name="barnraise_agent_info", kind="gauge", own_labels=("version",), help="1, with the agent's version."
)
AGENT_START = _agent(
    name="barnraise_agent_start_time_seconds", kind="gauge", unit="time", help="When the agent started."
)
AGENT_CPU = _agent(
    name="barnraise_agent_cpu_seconds_total",
    kind="counter",
    unit="seconds",
    help="Processor time of the agent.",
)
AGENT_MEMORY = _agent(
    name="barnraise_agent_memory_bytes", kind="gauge", unit="bytes", help="Memory that the agent holds."
)
MACHINES = _agent(
    name="barnraise_machines",
    kind="gauge",
    own_labels=("state",),
    help="Machines of the cluster, online or offline as this machine sees them.",
)
CLUSTER_DECIDES = _agent(
    name="barnraise_cluster_decides",
    kind="gauge",
    help="1 if this machine is in a majority that can decide, else 0.",
)
PAUSED = _agent(
    name="barnraise_machine_paused",
    kind="gauge",
    help="1 if its limits keep runs of other machines away from this one, else 0.",
)
AGENT_LINKS = _agent(
    name="barnraise_agent_links",
    kind="gauge",
    own_labels=("route",),
    help="Connections to other agents that are open now.",
)
AGENT_LINK_LOSSES = _agent(
    name="barnraise_agent_link_losses_total",
    kind="counter",
    help="Machines to which the last control connection was lost, each time.",
)
AGENT_ROUND_TRIP = _agent(
    name="barnraise_agent_round_trip_seconds",
    kind="gauge",
    unit="seconds",
    own_labels=("machine",),
    help="Shortest recent round trip of heartbeats to a machine.",
)
HEARTBEATS = _agent(
    name="barnraise_agent_heartbeats_total",
    kind="counter",
    own_labels=("direction",),
    help="Heartbeats that were sent to other agents and received from them.",
)
AGENT_BYTES = _agent(
    name="barnraise_agent_transferred_bytes_total",
    kind="counter",
    unit="bytes",
    own_labels=("route", "direction"),
    help="Encrypted bytes between agents: control, bulk (logs, records, store) and files.",
)
STORE_COMMITS = _agent(
    name="barnraise_store_commits_total",
    kind="counter",
    own_labels=("store",),
    help="Operations that the cluster committed in its store or its journals, as this machine's copy saw.",
)
RUNS = _agent(name="barnraise_runs", kind="gauge", help="Runs that use this machine now.")
WORKERS = _agent(name="barnraise_workers", kind="gauge", help="Workers that run on this machine now.")
WORKER_STARTS = _agent(
    name="barnraise_worker_starts_total",
    kind="counter",
    own_labels=("reason",),
    help="Workers that were started: for a new run, or again after a loss or a pause.",
)
WORKER_EXITS = _agent(
    name="barnraise_worker_exits_total",
    kind="counter",
    own_labels=("outcome",),
    help="Workers that exited: finished, failed or killed by a signal.",
)
JOBS = _agent(
    name="barnraise_queue_jobs", kind="gauge", own_labels=("state",), help="Jobs of the cluster's queue."
)
DISK_USED = _agent(
    name="barnraise_disk_used_bytes",
    kind="gauge",
    unit="bytes",
    own_labels=("part",),
    help="Disk space that Barnraise uses: runs, files and environments.",
)
DISK_FREE = _agent(
    name="barnraise_disk_free_bytes",
    kind="gauge",
    unit="bytes",
    help="Free space of the disk with the state directory.",
)

# Devices of the machine

DEVICE_UTILIZATION = _device(
    name="barnraise_device_utilization_ratio",
    kind="gauge",
    unit="ratio",
    help="How busy a processor or accelerator was, from 0 to 1.",
)
DEVICE_MEMORY_USED = _device(
    name="barnraise_device_memory_used_bytes",
    kind="gauge",
    unit="bytes",
    help="Memory of a device that all programs together use.",
)
DEVICE_MEMORY_SIZE = _device(
    name="barnraise_device_memory_size_bytes", kind="gauge", unit="bytes", help="Size of a device's memory."
)
DEVICE_TEMPERATURE = _device(
    name="barnraise_device_temperature_celsius",
    kind="gauge",
    unit="celsius",
    help="Temperature of a processor or accelerator.",
)
DEVICE_POWER = _device(
    name="barnraise_device_power_watts",
    kind="gauge",
    unit="watts",
    help="Power that a processor or accelerator takes.",
)
BATTERY_CHARGE = Series(
    name="barnraise_battery_charge_ratio",
    kind="gauge",
    source="device",
    unit="ratio",
    help="Charge of the machine's batteries, from 0 to 1.",
)
BATTERY_POWER = Series(
    name="barnraise_battery_power_watts",
    kind="gauge",
    source="device",
    unit="watts",
    help="Power that the machine takes from its batteries.",
)

# Workers

STEPS = _worker(name="barnraise_steps_total", kind="counter", help="Steps that this worker committed.")
SAMPLES = _worker(
    name="barnraise_samples_total",
    kind="counter",
    help="Samples of committed steps that this worker computed; of a split model, those of all steps.",
)
STEP_TIME = _worker(
    name="barnraise_step_seconds",
    kind="histogram",
    unit="seconds",
    buckets=_STEP,
    help="Time from one commit to the next.",
)
PHASE_TIME = _worker(
    name="barnraise_step_phase_seconds_total",
    kind="counter",
    unit="seconds",
    own_labels=("phase",),
    help="Time of steps by phase: data (loading), compute (the script's own code), communication, vote, "
    "checkpoint, other, and activations (waiting for those of a split model).",
)
LOSS = _worker(
    name="barnraise_loss", kind="gauge", help="The value that the script logged as `loss`, of the last step."
)
GROUP_SIZE = _worker(
    name="barnraise_group_workers", kind="gauge", help="Workers that train together with this one."
)
REGROUPS = _worker(
    name="barnraise_regroups_total", kind="counter", help="Groups that this worker joined, also the first."
)
RECOVERY_TIME = _worker(
    name="barnraise_recovery_seconds",
    kind="histogram",
    unit="seconds",
    buckets=_RECOVERY,
    help="Time from leaving a broken or old group to training in the next one.",
)
RECEIVED_STATES = _worker(
    name="barnraise_received_states_total",
    kind="counter",
    own_labels=("kind",),
    help="States that this worker received: live while others trained, or blocking.",
)
CHECKPOINTS = _worker(
    name="barnraise_checkpoints_total", kind="counter", help="Checkpoints that this worker wrote to its disk."
)
CHECKPOINT_TIME = _worker(
    name="barnraise_checkpoint_write_seconds",
    kind="histogram",
    unit="seconds",
    buckets=_OPERATION,
    help="Time to write a checkpoint to the disk. Training continues meanwhile, except with a split model.",
)
ITEMS = _worker(
    name="barnraise_map_items_total", kind="counter", help="Items of a map that this worker computed."
)
ACTIVATION_BYTES = _worker(
    name="barnraise_activation_sent_bytes_total",
    kind="counter",
    unit="bytes",
    help="Activations of a split model and their gradients that this worker sent to other machines.",
)
MOVED_STATE_BYTES = _worker(
    name="barnraise_moved_state_bytes_total",
    kind="counter",
    unit="bytes",
    own_labels=("kind",),
    help="Trained state that this worker received because the blocks of a split model were placed again: for "
    "its stage (stage), or as the mirror of others (mirror).",
)
COLLECTIVE_TIME = _worker(
    name="barnraise_collective_duration_seconds",
    kind="histogram",
    unit="seconds",
    own_labels=("kind", "strategy"),
    buckets=_OPERATION,
    help="Time of a collective from its call to its end.",
)
COLLECTIVE_BYTES = _worker(
    name="barnraise_collective_payload_bytes_total",
    kind="counter",
    unit="bytes",
    own_labels=("kind",),
    help="Size of the tensors that were given to collectives.",
)
COLLECTIVE_FAILURES = _worker(
    name="barnraise_collective_failures_total",
    kind="counter",
    own_labels=("kind", "code"),
    help="Collectives that ended in an error, by the code of the error.",
)
GROUPS_OPEN = _worker(
    name="barnraise_groups_open", kind="gauge", help="Process groups that are open in this worker."
)
TORCH_MEMORY = _worker(
    name="barnraise_torch_memory_bytes",
    kind="gauge",
    unit="bytes",
    own_labels=("device",),
    help="Memory of the accelerator that torch has allocated in this worker.",
)
WORKER_CPU = _worker(
    name="barnraise_worker_cpu_seconds_total",
    kind="counter",
    unit="seconds",
    help="Processor time of this worker.",
)
WORKER_MEMORY = _worker(
    name="barnraise_worker_memory_bytes", kind="gauge", unit="bytes", help="Memory that this worker holds."
)

# Communication processes

WIRE_SENT = _comm(
    name="barnraise_wire_sent_bytes_total",
    kind="counter",
    unit="bytes",
    help="Bytes sent to other workers, without what TLS adds.",
)
WIRE_RECEIVED = _comm(
    name="barnraise_wire_received_bytes_total",
    kind="counter",
    unit="bytes",
    help="Bytes received from other workers, without what TLS adds.",
)
RETRANSMITS = _comm(
    name="barnraise_wire_retransmits_total",
    kind="counter",
    help="TCP segments that the system sent again, on open links (Linux only).",
)
LINKS_OPEN = _comm(name="barnraise_links_open", kind="gauge", help="Links to other workers that are open.")
LINKS_OPENED = _comm(
    name="barnraise_links_opened_total", kind="counter", help="Links to other workers that were established."
)
LINKS_LOST = _comm(
    name="barnraise_links_lost_total", kind="counter", help="Links to other workers that were closed or lost."
)
LINK_ROUND_TRIP = _comm(
    name="barnraise_link_round_trip_seconds",
    kind="gauge",
    unit="seconds",
    help="Longest round trip of the links to other workers.",
)
COMM_OPERATIONS = _comm(
    name="barnraise_comm_operations_total",
    kind="counter",
    help="Operations that the communication process executed.",
)
COMM_FAILURES = _comm(
    name="barnraise_comm_failures_total", kind="counter", help="Groups that failed in this process."
)
COMM_CPU = _comm(
    name="barnraise_comm_cpu_seconds_total",
    kind="counter",
    unit="seconds",
    help="Processor time of the communication process.",
)
COMM_MEMORY = _comm(
    name="barnraise_comm_memory_bytes",
    kind="gauge",
    unit="bytes",
    help="Memory that the communication process holds.",
)

# Hub

HUB_ANSWERS = _hub(
    name="barnraise_hub_answers_total",
    kind="counter",
    own_labels=("route", "status"),
    help="Responses by route and status.",
)
HUB_ANSWER_TIME = _hub(
    name="barnraise_hub_answer_seconds",
    kind="histogram",
    unit="seconds",
    own_labels=("route",),
    buckets=_HUB,
    help="Time from request headers to response, without long polls.",
)
HUB_RECEIVED = _hub(
    name="barnraise_hub_received_bytes_total", kind="counter", unit="bytes", help="Bytes of request bodies."
)
HUB_SAMPLES = _hub(name="barnraise_hub_samples_total", kind="counter", help="Samples in committed versions.")
HUB_UPDATES = _hub(name="barnraise_hub_updates_total", kind="counter", help="Updates in committed versions.")
HUB_COMMIT_TIME = _hub(
    name="barnraise_hub_commit_seconds",
    kind="histogram",
    unit="seconds",
    buckets=_HUB,
    help="Duration of log commits.",
)
HUB_SLOW_DISK = _hub(name="barnraise_hub_slow_disk", kind="gauge", help="1 if the disk is slow, else 0.")
HUB_TROUBLES = _hub(name="barnraise_hub_troubles", kind="gauge", help="Current health warnings.")
HUB_VERSION = _hub(name="barnraise_hub_version", kind="gauge", help="Newest version of the model.")
HUB_MEMBERS = _hub(name="barnraise_hub_members", kind="gauge", help="Members that joined.")
HUB_QUARANTINED = _hub(name="barnraise_hub_quarantined", kind="gauge", help="Members in quarantine.")
HUB_LEASES = _hub(name="barnraise_hub_leases", kind="gauge", help="Active leases.")
HUB_WAITING = _hub(
    name="barnraise_hub_waiting", kind="gauge", help="Updates that wait for the end of their round."
)
HUB_REFUSALS = _hub(name="barnraise_hub_refusals", kind="gauge", help="Refusals on the status page.")
HUB_STORED = _hub(name="barnraise_hub_stored", kind="gauge", help="Blobs in the object store.")

CATALOGUE: tuple[Series, ...] = tuple(
    thing for thing in list(globals().values()) if isinstance(thing, Series)
)


def _by_sample_name(series: Iterable[Series]) -> dict[str, Series]:
    return {name: each for each in series for name in each.sample_names}


BY_SAMPLE_NAME = _by_sample_name(CATALOGUE)
