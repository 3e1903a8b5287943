"""Compute a launch plan from a spec and machine facts: device, ranks, batch arithmetic, rendezvous, environment. No
I/O, no torch.

The planning machine is not the training machine: with ``launcher: slurm``, the login node's GPUs are ignored. The
requested allocation decides the device; if it requests no GPUs, the nodes' facts decide when the job runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning import rank_environment
from allranks.planning.env_vars import env_warnings
from allranks.planning.network_policy import NetworkJob
from allranks.planning.records import (
    ON_NODE,
    PARTITION,
    REQUESTED,
    THIS_MACHINE,
    BatchPlan,
    DeviceChoice,
    LaunchPlan,
    Limits,
    NodePlan,
)
from allranks.planning.slurm_request import (
    SIGNAL_EARLY_S,
    gpus_requested,
    parse_time_limit,
    partition_requested,
    require_consistent,
    takes_whole_nodes,
)
from allranks.rundir.files import SCHEMA_VERSION
from allranks.spec.models import is_flash_attention
from allranks.spec.records import RECOMPUTE_AUTO, RECOMPUTE_NONE, RunSpec
from allranks.spec.strategies import engine_param_dtype, plan_options, strategy_info
from allranks.spec.validation import profile_warnings, training_warnings
from allranks.utils.machine import MachineFacts


def choose_device(spec: RunSpec, facts: MachineFacts) -> DeviceChoice:
    """Decide the device from the spec, this machine and the partition.

    Raises:
        EnvironmentNotAble: ``cluster.device`` is cuda with ``launcher: local``, and this machine has no GPU.
    """
    launcher = spec.cluster.launched_by
    if launcher.runs_here and spec.cluster.device == "cuda" and not facts.gpus:
        raise EnvironmentNotAble(
            f"cluster.device is cuda, but {facts.host} has no GPU that this process may use (nvidia-smi -L; AMD: "
            "/dev/kfd, /dev/dri); set cluster.device: auto to run on the CPU"
        )
    gpus = _slurm(spec, facts) if launcher.uses_slurm else _machine(spec, facts)
    if spec.cluster.device == "auto":
        return gpus
    return DeviceChoice(
        device=spec.cluster.device, source=REQUESTED, reason=f"cluster.device: {spec.cluster.device}", gpus=gpus.gpus
    )


def _machine(spec: RunSpec, facts: MachineFacts) -> DeviceChoice:
    count = len(facts.gpus)
    hosts, own = spec.cluster.hosts, {facts.host, "localhost", "127.0.0.1", "::1"}
    listed = not hosts or any(host in own or host.split(".")[0] == facts.host for host in hosts)
    if spec.cluster.launched_by.uses_hosts and not listed:
        reason = f"this machine, {facts.host}, is not in cluster.hosts: set cluster.device to cuda or cpu"
        return _provisional(spec, reason, None)
    return DeviceChoice(
        device="cuda" if count else "cpu",
        source=THIS_MACHINE,
        reason=f"{facts.host} has {count or 'no'} GPU{'s' * (count != 1)}",
        gpus=count,
    )


def _slurm(spec: RunSpec, facts: MachineFacts) -> DeviceChoice:
    cluster, there = spec.cluster, facts.partition_gpus
    requested = gpus_requested(cluster)
    if requested is not None:
        device = "cpu" if requested.per_node == 0 else "cuda"
        gpus = there if requested.per_node is None else requested.per_node
        return DeviceChoice(device=device, source=REQUESTED, reason=requested.option, gpus=gpus)
    name = partition_requested(cluster) or facts.partition
    where = f"the partition {name}" if name else "the default partition"
    if there is None:
        return _provisional(spec, f"Slurm did not report whether {where} has GPUs, and the spec requests none", None)
    has = f"{where} has {there or 'no'} GPU{'s' * (there != 1)} per node"
    if there == 0:
        return DeviceChoice(device="cpu", source=PARTITION, reason=has, gpus=0)
    if takes_whole_nodes(cluster):
        return DeviceChoice(
            device="cuda", source=PARTITION, reason=f"{has}, and an exclusive job gets all of them", gpus=there
        )
    return _provisional(spec, f"{has}, but the spec requests none: set cluster.slurm.gpus_per_node", there)


def _provisional(spec: RunSpec, reason: str, gpus: int | None) -> DeviceChoice:
    """Plan for the CPU, unless the backend works on GPUs only."""
    device = "cuda" if spec.cluster.backend == "nccl" else "cpu"
    return DeviceChoice(device=device, source=ON_NODE, reason=reason, gpus=gpus)


def make_plan(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Decide everything that can be decided before a process starts, except compilation, and recomputation for auto
    (`memory.make_plan`).

    Raises:
        SpecError: the spec contradicts itself or the machine facts (batch that is not divisible, more ranks than GPUs).
        EnvironmentNotAble: a GPU is requested and there is none.
    """
    cluster = spec.cluster
    chosen_device = choose_device(spec, facts)
    device = chosen_device.device
    procs = cluster.procs_per_node or _default_procs(spec, chosen_device)
    world = procs * cluster.nodes
    warnings: list[str] = []
    chosen = strategy_info(spec.strategy.name)
    if chosen.single_process and world != 1:
        raise SpecError(
            f"strategy {spec.strategy.name} is for one process, the plan has {world}; set cluster.procs_per_node: 1 or "
            "another strategy"
        )
    if device == "cuda" and cluster.launched_by.runs_here and procs > len(facts.gpus) and cluster.backend != "gloo":
        raise SpecError(
            f"cluster.procs_per_node is {procs}, but {facts.host} has {len(facts.gpus)} GPUs; NCCL needs one per rank "
            "(or set cluster.backend: gloo to share)"
        )
    if device == "cpu" and procs > facts.cpus and cluster.launched_by.runs_here:
        warnings.append(
            f"{procs} ranks share {facts.cpus} cores: they compete for them, and timings are not meaningful"
        )
    unused = [f"cluster.{key}" for key in ("modules", "setup") if getattr(cluster, key)]
    if unused and cluster.launched_by.runs_here:
        warnings.append(
            f"{' and '.join(unused)}: not used by the {cluster.launcher} launcher, whose ranks have the environment of "
            "this shell"
        )
    if cluster.launched_by.uses_slurm:
        require_consistent(cluster)
    warnings += _time_warnings(spec)
    warnings += env_warnings(cluster.env)
    warnings += rank_environment.secret_warnings(spec)
    warnings += training_warnings(spec, _max_steps(spec))
    warnings += profile_warnings(spec, world, _max_steps(spec))
    hosts = _hosts(spec, facts)
    dtype, param_dtype = _dtypes(spec, device)
    if param_dtype != "float32" and not chosen.keeps_master_weights:
        warnings.append(
            "train.param_dtype is bfloat16: updates smaller than about 1/256 of a weight are lost to rounding, and "
            "AdamW's second moment barely decays; expect a higher loss than with the default float32"
        )
    _require_isolation(spec)
    _require_gpu_for_attention(spec, chosen_device)
    _require_float8(spec, chosen_device, facts, dtype)
    if spec.model is not None and spec.model.float8 and device == "cpu":
        warnings.append("model.float8: CPUs have no such products; they are emulated in float32, which takes longer")
    batch = batch_plan(spec, world) if spec.script is None else None
    recomputation = spec.model.recomputation if spec.model else RECOMPUTE_NONE
    return LaunchPlan(
        run_name=spec.name,
        launcher=cluster.launcher,
        strategy=spec.strategy.name,
        strategy_options=plan_options(
            spec,
            batch.micro_batch_size if batch else 1,
            batch.grad_accum if batch else 1,
            world=world,
            dtype=dtype,
            device=device,
        ),
        device=device,
        backend=_backend(spec, device),
        dtype=dtype,
        param_dtype=param_dtype,
        recomputation=RECOMPUTE_NONE if recomputation == RECOMPUTE_AUTO else recomputation,
        world_size=world,
        procs_per_node=procs,
        nodes=[
            NodePlan(node=n, host=hosts[n], ranks=list(range(n * procs, (n + 1) * procs))) for n in range(cluster.nodes)
        ],
        rendezvous=_rendezvous(spec),
        batch=batch,
        max_steps=_max_steps(spec),
        epochs=spec.train.epochs,
        environment=rank_environment.decide_environment(
            spec, network_job(spec, device), cpus=facts.cpus, procs_per_node=procs
        ),
        warnings=warnings,
        timeout_s=cluster.timeout_s,
        device_source=chosen_device.source,
        device_reason=chosen_device.reason,
        hang=limits_of(spec),
        grace_s=spec.script.grace_s if spec.script else None,
        schema_version=SCHEMA_VERSION,
    )


def network_job(spec: RunSpec, device: str) -> NetworkJob:
    """Return the part of the spec that the network rules need."""
    cluster = spec.cluster
    return NetworkJob(
        nodes=cluster.nodes,
        device=device,
        backend=_backend(spec, device),
        interface=cluster.rendezvous.interface,
        user=cluster.env,
    )


def _time_warnings(spec: RunSpec) -> list[str]:
    """Warn about short time limits: Slurm may send the signal a minute early, in a short job immediately."""
    slurm = spec.cluster.slurm
    limit = parse_time_limit(slurm.time) if spec.cluster.launched_by.uses_slurm and slurm.time else None
    if limit is None or limit > slurm.signal_s + SIGNAL_EARLY_S:
        return []
    return [
        f"cluster.slurm.time {slurm.time} leaves the ranks almost no time: they receive the stop signal "
        f"{slurm.signal_s} s before it (cluster.slurm.signal_s), and Slurm does so up to {SIGNAL_EARLY_S} s early; "
        "increase the time limit or reduce signal_s"
    ]


def batch_plan(spec: RunSpec, world_size: int) -> BatchPlan:
    """Compute micro x ranks x accumulation = global; refuse a ``global_batch_size`` that is not divisible."""
    micro = spec.train.micro_batch_size
    if spec.train.global_batch_size is None:
        accum = spec.train.grad_accum or 1
        return BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * world_size * accum)
    wanted, unit = spec.train.global_batch_size, micro * world_size
    if wanted % unit:
        below, above = wanted // unit * unit or unit, (wanted // unit + 1) * unit
        raise SpecError(
            f"train.global_batch_size {wanted} is not divisible by micro_batch_size {micro} x {world_size} ranks = "
            f"{unit}; the nearest valid value: {str(below) + ' or ' if below != above else ''}{above}"
        )
    return BatchPlan(micro_batch_size=micro, grad_accum=wanted // unit, global_batch_size=wanted)


def _max_steps(spec: RunSpec) -> int | None:
    if spec.script is not None or spec.train.epochs is not None:
        return None
    return 10 if spec.train.max_steps is None else spec.train.max_steps


def _default_procs(spec: RunSpec, chosen: DeviceChoice) -> int:
    if strategy_info(spec.strategy.name).single_process:
        return 1
    if chosen.device != "cuda":
        return 2
    return chosen.gpus or 1


def resolve_device(spec: RunSpec, plan: LaunchPlan, gpus_by_host: Mapping[str, int]) -> RunSpec | None:
    """Decide a device that the plan could not know, from the GPUs that the nodes report.

    Args:
        plan: the plan made from `spec` before the nodes reported.
        gpus_by_host: visible GPUs of every node of the job; without nodes that did not answer.

    Returns:
        The spec with ``cluster.device``, ``backend`` and ``procs_per_node`` set, to plan again; None if the plan
        is already right, or nothing was open.

    Raises:
        EnvironmentNotAble: some of the nodes have GPUs and others do not.
    """
    cluster = spec.cluster
    if cluster.device != "auto" or plan.device_source not in (ON_NODE, PARTITION) or not gpus_by_host:
        return None
    without = sorted(host for host, gpus in gpus_by_host.items() if not gpus)
    if without and len(without) < len(gpus_by_host):
        others = sorted(set(gpus_by_host) - set(without))
        raise EnvironmentNotAble(
            f"cluster.device is auto, but {', '.join(others)} reported GPUs and {', '.join(without)} none; set "
            "cluster.slurm.gpus_per_node or cluster.device: cpu, or exclude nodes with cluster.slurm.exclude"
        )
    chosen = DeviceChoice(
        device="cpu" if without else "cuda", source=ON_NODE, reason="", gpus=min(gpus_by_host.values())
    )
    procs = cluster.procs_per_node or _default_procs(spec, chosen)
    if (chosen.device, procs) == (plan.device, plan.procs_per_node):
        return None
    settled = msgspec.structs.replace(
        cluster, device=chosen.device, backend=_backend(spec, chosen.device), procs_per_node=procs
    )
    return msgspec.structs.replace(spec, cluster=settled)


def _backend(spec: RunSpec, device: str) -> str:
    if spec.cluster.backend == "nccl" and device != "cuda":
        raise SpecError("cluster.backend is nccl, which needs GPUs; the device is cpu, so use gloo or auto")
    if spec.cluster.backend != "auto":
        return spec.cluster.backend
    return "nccl" if device == "cuda" else "gloo"


def _dtypes(spec: RunSpec, device: str) -> tuple[str, str]:
    """Return the precision of compute, and that of trained weights."""
    wanted, stored = spec.model.dtype if spec.model else "auto", spec.train.param_dtype
    dtype = wanted if wanted != "auto" else "bfloat16" if device == "cuda" else "float32"
    if spec.script is None and (dtype, stored) == ("float32", "bfloat16"):
        because = "model.dtype is float32" if wanted != "auto" else "model.dtype: auto is float32 on a CPU"
        raise SpecError(
            f"train.param_dtype is bfloat16, but {because}: trained weights cannot have less precision than the "
            "computation; remove param_dtype, or set model.dtype: bfloat16"
        )
    engine = engine_param_dtype(spec) if dtype == "bfloat16" else None
    return dtype, engine or stored


def _require_isolation(spec: RunSpec) -> None:
    """Refuse a batch in which flash attention would let packed rows attend to each other.

    transformers finds the rows of a packed sequence by its position ids only if the batch has one sequence. It is told
    their lengths (`flash_lengths`), but layers of some model types do not pass them on.
    """
    if spec.model is None or spec.data is None or not is_flash_attention(spec.model.attention):
        return
    if spec.data.packing == "isolated" and spec.train.micro_batch_size > 1:
        raise SpecError(
            f"model.attention {spec.model.attention} with data.packing: isolated and train.micro_batch_size "
            f"{spec.train.micro_batch_size}: rows of one sequence would attend to each other; set "
            "train.micro_batch_size: 1 (and grad_accum instead), data.packing: none, or model.attention: sdpa"
        )


def _require_gpu_for_attention(spec: RunSpec, chosen: DeviceChoice) -> None:
    if chosen.device == "cpu" and chosen.source != ON_NODE and spec.model and is_flash_attention(spec.model.attention):
        raise SpecError(
            f"model.attention {spec.model.attention} needs a GPU, and the plan is for CPUs; set model.attention: sdpa"
        )


def _require_float8(spec: RunSpec, chosen: DeviceChoice, facts: MachineFacts, dtype: str) -> None:
    if spec.model is None or not spec.model.float8 or chosen.device != "cuda":
        return
    if dtype != "bfloat16":
        raise SpecError(
            f"model.float8 is true, but model.dtype is {dtype}: its products on GPUs give bfloat16; set that"
        )
    old = [gpu.name for gpu in facts.gpus if WITHOUT_FLOAT8.search(gpu.name)]
    if old and spec.cluster.launched_by.runs_here:
        raise SpecError(
            f"model.float8 is true, but {facts.host} has {old[0]}, which has no 8-bit floats; set it to false"
        )


def _hosts(spec: RunSpec, facts: MachineFacts) -> list[str | None]:
    if spec.cluster.launched_by.runs_here:
        return [facts.host]
    if spec.cluster.launched_by.uses_hosts and spec.cluster.hosts:
        return list(spec.cluster.hosts)
    return [None] * spec.cluster.nodes


def _rendezvous(spec: RunSpec) -> str:
    if spec.cluster.launched_by.runs_here:
        return "a free port on 127.0.0.1, chosen when the ranks start"
    wanted = spec.cluster.rendezvous
    if spec.cluster.launched_by.uses_hosts:
        first = wanted.address or (spec.cluster.hosts[0] if spec.cluster.hosts else "the first of cluster.hosts")
        return f"{first}, port {wanted.port or 'from the name of the run'}"
    address = wanted.address or "address reported by node 0"
    return f"{address}, port {wanted.port or 'from the job id, probed on node 0'}"


WITHOUT_FLOAT8 = re.compile(r"\b(P100|V100\w*|T4|A2|A10G?|A16|A30|A40|A100|A800|RTX A\d+|MI\d+\w*)\b")
AUTO_MOST_S = 300.0
AUTO_SHARE = 0.5  # share of the collectives' timeout
SHORTEST_TIMEOUT_S = 20  # a shorter timeout leaves no time to detect and inspect a hang
ROOM_SHARE, ROOM_S = 0.1, 8.0  # time for the inspection: share of the collectives' timeout, and minimum
SCRIPT_S = 120.0
"""Silence of a user's own program without any work, at least."""
SCRIPT_BUSY_S = 1200.0
"""Silence of a user's own program in which a rank works while others wait; gloo's own timeout is 1800 s."""
SCRIPT_BUSY_FACTOR = 4.0


def limits_of(spec: RunSpec) -> Limits | None:
    """Return the hang limits of a run; None if it is not monitored.

    Raises:
        SpecError: collectives would time out earlier.
    """
    hang_s, timeout = spec.observe.hang_s, spec.cluster.timeout_s
    if spec.script is not None:  # it sets the timeout of its collectives itself
        if isinstance(hang_s, str):
            return Limits(step_s=SCRIPT_S, long_s=SCRIPT_BUSY_S)
        return None if hang_s is None else Limits(step_s=hang_s, long_s=SCRIPT_BUSY_FACTOR * hang_s)
    if hang_s == "auto":
        if timeout < SHORTEST_TIMEOUT_S:
            return None
        hang_s = min(AUTO_MOST_S, AUTO_SHARE * timeout)
    if hang_s is None:
        return None
    if hang_s >= timeout:
        raise SpecError(
            f"observe.hang_s is {hang_s:g}, but collectives time out after {timeout} s (cluster.timeout_s), which "
            "would end the ranks before they could be inspected; reduce it, or increase cluster.timeout_s"
        )
    return Limits(step_s=hang_s, long_s=max(hang_s, timeout - max(ROOM_SHARE * timeout, ROOM_S)))
