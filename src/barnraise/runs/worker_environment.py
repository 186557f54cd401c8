"""Environment variables of a worker, with the names that torch's own launcher uses. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from barnraise.agent_client.machine_limits import SEND_MBPS_VARIABLE, MachineLimits
from barnraise.runs.record import RunRecord, RunSpec

# Programs expect these to be set. The host does not exist; the cluster's own store is used instead.
MASTER_ADDR = "barnraise.invalid"
MASTER_PORT = "52416"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Older names of the variable for the Hugging Face cache, which win over the newer one in older libraries.
_OLD_CACHE_VARIABLES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
# On Macs: the hard limit, and the soft one, which must not be above it.
_METAL_VARIABLES = ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")


def worker_environment(
    base: Mapping[str, str],
    order: RunSpec,
    record: RunRecord,
    rank: int,
    *,
    start: int,
    state_directory: str,
    local_store: str,
    checkpoints: str,
    data: Mapping[str, str],
    model_cache: str,
    cores: int,
    values: Mapping[str, str],
    limits: MachineLimits,
) -> dict[str, str]:
    """Return all variables of a worker. ``values``: of the variables that the user set.

    ``data``: paths of data sets and models by their variables. ``model_cache``: the run's own Hugging Face
    cache; empty if the run has no model with an id.

    Variables of the user override those of the machine. Neither overrides the worker's identity.
    """
    slot = record.slots[rank]
    local_ranks = record.ranks_of(slot.node)
    machines = record.nodes
    index = {node: index for index, node in enumerate(machines)}
    variables = {name: value for name, value in base.items() if not name.startswith("BARNRAISE_")}
    # Otherwise torch does not load our backend, and `init_process_group("barnraise")` waits without end.
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    if model_cache:
        variables = {name: value for name, value in variables.items() if name not in _OLD_CACHE_VARIABLES}
        variables |= {"HF_HUB_CACHE": model_cache, "HF_HUB_OFFLINE": "1"}
    variables |= {**dict(order.program.settings), **values}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(local_ranks))))
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables.setdefault("PYTHONIOENCODING", "utf-8")  # as logs are read; Windows has another one for pipes
    # The log keeps every state of a progress bar. tqdm would write ten of them in a second.
    variables.setdefault("TQDM_MININTERVAL", "0.5")
    variables |= data
    variables |= _limit_variables(limits, variables, len(local_ranks))
    device = slot.device
    if order.device.startswith("cuda:"):  # a script that knows nothing of Barnraise sees only this one
        device, variables["CUDA_VISIBLE_DEVICES"] = "cuda:0", _visible_device(order.device, variables)
    return variables | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(record.slots)),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(len(local_ranks)),
        "GROUP_RANK": str(index[slot.node]),
        "GROUP_WORLD_SIZE": str(len(machines)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(len(record.slots)),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": MASTER_PORT,
        "TORCHELASTIC_RUN_ID": order.run,
        "TORCHELASTIC_RESTART_COUNT": str(record.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(order.options.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "BARNRAISE_LAUNCHED": "1",
        "BARNRAISE_RUN": order.run,
        "BARNRAISE_NODE": slot.node.hex(),
        "BARNRAISE_GENERATION": str(record.generation),
        "BARNRAISE_START": str(start),
        "BARNRAISE_STATE_DIRECTORY": state_directory,
        "BARNRAISE_LOCAL_STORE": local_store,
        "BARNRAISE_CHECKPOINTS": checkpoints,
        "BARNRAISE_RESUMES": ",".join(order.resumes),
        "BARNRAISE_DEVICE": device,
        "BARNRAISE_MACHINES": ",".join(str(index[other.node]) for other in record.slots),
        "BARNRAISE_ENGINE": order.options.engine,
        "BARNRAISE_FABRIC": order.options.fabric,
    }


def _visible_device(device: str, known: Mapping[str, str]) -> str:
    """Return the name of a device for the CUDA runtime, which may see only some of them already."""
    number = int(device.partition(":")[2])
    visible = [name.strip() for name in known.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[number] if number < len(visible) else str(number)


def _limit_variables(limits: MachineLimits, known: Mapping[str, str], workers: int) -> dict[str, str]:
    """Return the variables that limit a worker; torch itself obeys those of the GPU's memory."""
    variables = {}
    if limits.mbps:
        variables[SEND_MBPS_VARIABLE] = f"{limits.mbps / workers:g}"
    if limits.gpu_memory_percent:
        share = limits.gpu_memory_percent / 100
        for name in _ALLOCATOR_VARIABLES:  # torch reads the first of them that is set
            if known.get(name) or name == _ALLOCATOR_VARIABLES[-1]:
                given = [known[name]] if known.get(name) else []
                variables[name] = ",".join([*given, f"per_process_memory_fraction:{share:g}"])
        variables |= dict.fromkeys(_METAL_VARIABLES, f"{share:g}")
    return variables
