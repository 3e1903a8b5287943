"""Join the process group through the agent's store, and seed, save and restore this rank's random generators."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from allranks.errors import EnvironmentNotAble
from allranks.planning.env_vars import MULTI_RANK_GPU
from allranks.planning.rank_environment import NUMA_BINDING
from allranks.planning.records import LaunchPlan
from allranks.rundir.heartbeat import STORE_VARIABLE
from allranks.train import step_timers
from allranks.utils.machine import AMD_FILTERS, host_name
from allranks.utils.text import parse_ranges


def open_store(world_size: int, timeout: timedelta) -> dist.Store | None:
    """Open the store that `ALLRANKS_STORE` names: ``file:PATH`` or ``tcp:ADDRESS:PORT:PREFIX``. None without the
    variable: torch then uses ``env://``, as in the user's own programs."""
    kind, _, where = os.environ.get(STORE_VARIABLE, "").partition(":")
    if not kind:
        return None
    if kind == "file":
        store = dist.FileStore(where, world_size)
        store.set_timeout(timeout)
        return store
    address_and_port, _, prefix = where.rpartition(":")
    address, _, port = address_and_port.rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise EnvironmentNotAble(f"{STORE_VARIABLE}: unknown kind of store {kind!r}; expected file: or tcp:")
    return dist.PrefixStore(prefix, dist.TCPStore(address, int(port), world_size, False, timeout))


@dataclass(frozen=True)
class DistContext:
    """Rank, world size, device, process groups: ``group`` for training, ``control`` (Gloo, CPU) for small messages."""

    rank: int
    local_rank: int
    size: int
    host: str
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the files that are written once."""
        return self.rank == 0


# A single process; its groups are never used.
_NO_GROUP = cast(dist.ProcessGroup, None)
SINGLE_PROCESS = DistContext(0, 0, 1, "", torch.device("cpu"), _NO_GROUP, _NO_GROUP)


PCI_DEVICES = Path("/sys/bus/pci/devices")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def narrow_to_own_mig(local_rank: int, environment: MutableMapping[str, str]) -> int:
    """Leave this rank one MIG instance of those in CUDA_VISIBLE_DEVICES, because CUDA shows a process the first one
    only; return how many instances the ranks of this node share, 0 without MIG."""
    words = [word.strip() for word in environment.get(VISIBLE_DEVICES, "").split(",") if word.strip()]
    if not words or not all(word.startswith("MIG-") for word in words):
        return 0
    environment[VISIBLE_DEVICES] = words[local_rank % len(words)]
    return len(words)


def why_no_gpu(version: str, cuda: str | None, hip: str | None) -> str:
    """Explain why torch shows no GPU to a rank that is planned for one."""
    if cuda is None and hip is None:
        return (
            f"the ranks are planned for GPUs, but torch {version} is a build for CPUs: install one for the GPU of this "
            "node (https://pytorch.org/get-started/locally), or set cluster.device: cpu"
        )
    kind = f"CUDA {cuda} (NVIDIA)" if cuda is not None else f"ROCm {hip} (AMD)"
    hidden = [f"{name}={os.environ[name]}" for name in (*AMD_FILTERS, "SLURM_JOB_GPUS") if name in os.environ]
    return (
        f"the ranks are planned for GPUs, but torch {version}, built for {kind}, finds none: the GPU is of another "
        "vendor, its driver is too old for this build, or the environment hides it "
        f"({', '.join(hidden) or 'no variable does'}); or set cluster.device: cpu"
    )


def gpu_of(local_rank: int, procs_per_node: int, visible: int, backend: str, instances: int = 0) -> int:
    """Return the index of this rank's GPU among the visible ones; `instances` is what `narrow_to_own_mig` returned.

    Ranks share GPUs under gloo only: `EnvironmentNotAble` if there are fewer GPUs than ranks under NCCL.
    """
    if visible >= procs_per_node:
        return local_rank
    if backend == "nccl" and instances and MULTI_RANK_GPU not in os.environ:
        raise EnvironmentNotAble(
            f"{procs_per_node} ranks of this node have {instances} MIG instance{'s' * (instances != 1)}, and NCCL "
            "refuses several ranks on instances of one GPU: set cluster.procs_per_node: 1, or cluster.backend: gloo, "
            f"or (NCCL 2.31 and later) cluster.env.{MULTI_RANK_GPU}: '1'"
        )
    if backend == "nccl" and instances < procs_per_node:
        raise EnvironmentNotAble(
            f"{procs_per_node} ranks of this node see {visible} GPU{'s' * (visible != 1)} "
            f"({VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES, 'not set')}), and NCCL needs one for each. Under "
            "Slurm a node has one task, whose GPUs all its ranks share: set cluster.slurm.gpus_per_node: "
            f"{procs_per_node} instead of --gpus-per-task; or cluster.procs_per_node: {visible}"
        )
    return local_rank % visible


def bind_beside_gpu(bus: str, environment: Mapping[str, str], devices: Path = PCI_DEVICES) -> set[int]:
    """Bind this process to the allowed cores of its GPU's NUMA node and return them; empty if nothing has changed.

    Call before starting threads, which inherit the cores. Nothing happens without `NUMA_BINDING`, if the kernel does
    not know the cores, or if fewer would be left than the rank has threads. `bus`: PCI address (``0000:1b:00.0``).
    """
    if environment.get(NUMA_BINDING) != "1" or not hasattr(os, "sched_setaffinity"):
        return set()
    try:
        near = parse_ranges((devices / bus.lower() / "local_cpulist").read_text())
        allowed = os.sched_getaffinity(0)
        threads = environment.get("OMP_NUM_THREADS", "1")
        least = int(threads) if threads.isdigit() else 1
        if near >= allowed or len(near & allowed) < least:
            return set()
        os.sched_setaffinity(0, near & allowed)
    except (OSError, ValueError):
        return set()
    return near & allowed


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU; empty if this version of torch does not tell it."""
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return ""
    return f"{getattr(facts, 'pci_domain_id', 0):04x}:{facts.pci_bus_id:02x}:{getattr(facts, 'pci_device_id', 0):02x}.0"


def join_process_group(plan: LaunchPlan) -> DistContext:
    """Initialize the process group from the agent's environment, and create the control group.

    The timeout of collectives is ``cluster.timeout_s``.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=plan.timeout_s)
    device = torch.device("cpu")
    if plan.device == "cuda":
        instances = narrow_to_own_mig(local_rank, os.environ)
        visible = torch.cuda.device_count()
        if visible == 0:
            raise EnvironmentNotAble(why_no_gpu(torch.__version__, torch.version.cuda, torch.version.hip))
        device = torch.device("cuda", gpu_of(local_rank, plan.procs_per_node, visible, plan.backend, instances))
        torch.cuda.set_device(device)
        if address := pci_address(device):
            bind_beside_gpu(address, os.environ)
    bind = device if plan.backend == "nccl" else None
    step_timers.start_wait_timer()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(size, timeout)
    named = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(plan.backend, timeout=timeout, device_id=bind, **named)
    group = dist.group.WORLD
    assert group is not None
    control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout, group_desc="control"))
    return DistContext(dist.get_rank(), local_rank, dist.get_world_size(), host_name(), device, group, control)


def leave_process_group() -> None:
    """Leave the process group, if in one.

    Only after success: under NCCL this waits for the peers, which may wait in a collective for a failed rank. A failed
    rank ends its process instead (`allranks.launch.rank`).
    """
    if dist.is_initialized():
        dist.destroy_process_group()


T = TypeVar("T")


def from_first(world: DistContext, value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    if world.size == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=world.control)
    return values[0]


def rng_state() -> dict[str, Any]:
    """Return the states of the Python, NumPy, torch CPU and any CUDA generators; loadable with weights_only."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(np.asarray(keys, np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of `rng_state`."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["name"], numpy["keys"].numpy().astype(np.uint32), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators: each rank gets different dropout, the same in every run."""
    mixed = (seed * 1_000_003 + rank) % (2**32)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
