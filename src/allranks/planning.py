"""Spec and facts to a launch plan: ranks, batch arithmetic, rendezvous, environment. Pure, no I/O, no torch."""

from __future__ import annotations

import msgspec

from allranks import envpolicy
from allranks.envpolicy import EnvVar
from allranks.errors import EnvironmentNotAble, SpecError
from allranks.fabric.job import Job
from allranks.fabric.userset import user_warnings
from allranks.facts import MachineFacts
from allranks.hang.limits import Limits, limits_of
from allranks.observe.window import profile_warnings
from allranks.slurm.timelimit import SIGNAL_EARLY_S, seconds_of
from allranks.spec.records import RunSpec
from allranks.train.strategies import entry, plan_options


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many sequences make one optimizer step."""

    micro_batch_size: int
    grad_accum: int
    global_batch_size: int


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One node and the ranks on it; host None until the scheduler has said."""

    node: int
    host: str | None
    ranks: list[int]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What will run, decided before anything does."""

    run_name: str
    launcher: str
    strategy: str
    strategy_options: dict[str, object]
    device: str
    backend: str
    dtype: str
    world_size: int
    procs_per_node: int
    nodes: list[NodePlan]
    rendezvous: str
    batch: BatchPlan | None
    max_steps: int | None
    epochs: float | None
    environment: list[EnvVar]
    warnings: list[str]
    timeout_s: int
    rank_memory_bytes: int | None = None
    """What a rank will need at its peak, as `fit` estimates it; None where it is not known, or `--force` was given."""
    hang: Limits | None = None
    """How long ranks may be silent; None where nobody looks."""

    @property
    def work(self) -> str:
        """What runs on what; of a program of the user's own no strategy and no dtype are known."""
        if self.batch is None:
            return f"your own program, {self.backend} on {self.device}"
        return f"{self.strategy}, {self.backend} on {self.device}, {self.dtype}"

    def rank_rows(self) -> list[tuple[int, int, int, str]]:
        """(rank, node, local rank, host) of every rank."""
        return [(r, n.node, i, n.host or f"node {n.node}") for n in self.nodes for i, r in enumerate(n.ranks)]


def make_plan(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Decide everything that can be decided before a process is started.

    Raises:
        SpecError: the spec contradicts itself or the facts (batch that does not divide, more ranks than GPUs).
        EnvironmentNotAble: a GPU is asked for and there is none.
    """
    cluster = spec.cluster
    device = _device(spec, facts)
    procs = cluster.procs_per_node or _default_procs(spec, facts, device)
    world = procs * cluster.nodes
    warnings: list[str] = []
    chosen = entry(spec.strategy.name)
    if chosen.single_process and world != 1:
        raise SpecError(
            f"strategy {spec.strategy.name} is for one process, the plan has {world}; set cluster.procs_per_node: 1 or another strategy"
        )
    if device == "cuda" and cluster.launcher == "local" and procs > len(facts.gpus) and cluster.backend != "gloo":
        raise SpecError(
            f"cluster.procs_per_node is {procs}, but {facts.host} has {len(facts.gpus)} GPUs; NCCL needs one a rank (or set cluster.backend: gloo to share)"
        )
    if device == "cpu" and procs > facts.cpus and cluster.launcher == "local":
        warnings.append(f"{procs} ranks share {facts.cpus} cores: they will take turns, and timings mean little")
    warnings += _time_warnings(spec)
    warnings += user_warnings(cluster.env)
    warnings += profile_warnings(spec, world, _max_steps(spec))
    hosts = _hosts(spec, facts)
    dtype = _dtype(spec, device)
    batch = batch_plan(spec, world) if spec.script is None else None
    return LaunchPlan(
        run_name=spec.name,
        launcher=cluster.launcher,
        strategy=spec.strategy.name,
        strategy_options=plan_options(spec, batch, world=world, dtype=dtype, device=device),
        device=device,
        backend=_backend(spec, device),
        dtype=dtype,
        world_size=world,
        procs_per_node=procs,
        nodes=[
            NodePlan(node=n, host=hosts[n], ranks=list(range(n * procs, (n + 1) * procs))) for n in range(cluster.nodes)
        ],
        rendezvous=_rendezvous(spec),
        batch=batch,
        max_steps=_max_steps(spec),
        epochs=spec.train.epochs,
        environment=envpolicy.decide(spec, network_job(spec, device), cpus=facts.cpus, procs_per_node=procs),
        warnings=warnings,
        timeout_s=cluster.timeout_s,
        hang=limits_of(spec),
    )


def network_job(spec: RunSpec, device: str) -> Job:
    """The part of the spec that the network's rules need."""
    cluster = spec.cluster
    return Job(
        nodes=cluster.nodes,
        device=device,
        backend=_backend(spec, device),
        interface=cluster.rendezvous.interface,
        user=cluster.env,
    )


def _time_warnings(spec: RunSpec) -> list[str]:
    """Slurm sends the signal before the time limit up to a minute early; in a short job that is at once."""
    slurm = spec.cluster.slurm
    limit = seconds_of(slurm.time) if spec.cluster.launcher == "slurm" and slurm.time else None
    if limit is None or limit > slurm.signal_s + SIGNAL_EARLY_S:
        return []
    return [
        f"cluster.slurm.time {slurm.time} leaves the ranks hardly any time: they are asked to stop {slurm.signal_s} s before it "
        f"(cluster.slurm.signal_s), and Slurm does so up to {SIGNAL_EARLY_S} s early; make the limit longer or signal_s smaller"
    ]


def batch_plan(spec: RunSpec, world_size: int) -> BatchPlan:
    """micro x ranks x accumulation = global; refused if ``global_batch_size`` does not divide."""
    micro = spec.train.micro_batch_size
    if spec.train.global_batch_size is None:
        accum = spec.train.grad_accum or 1
        return BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * world_size * accum)
    wanted, unit = spec.train.global_batch_size, micro * world_size
    if wanted % unit:
        below, above = wanted // unit * unit or unit, (wanted // unit + 1) * unit
        raise SpecError(
            f"train.global_batch_size {wanted} is not divisible by micro_batch_size {micro} x {world_size} ranks = {unit}; "
            f"the nearest that is: {str(below) + ' or ' if below != above else ''}{above}"
        )
    return BatchPlan(micro_batch_size=micro, grad_accum=wanted // unit, global_batch_size=wanted)


def _max_steps(spec: RunSpec) -> int | None:
    if spec.script is not None or spec.train.epochs is not None:
        return None
    return 10 if spec.train.max_steps is None else spec.train.max_steps


def _device(spec: RunSpec, facts: MachineFacts) -> str:
    cluster = spec.cluster
    if cluster.device == "cuda" and cluster.launcher == "local" and not facts.gpus:
        raise EnvironmentNotAble(
            f"cluster.device is cuda, but {facts.host} shows no GPU (nvidia-smi -L); set cluster.device: auto to run on the CPU"
        )
    if cluster.device != "auto":
        return cluster.device
    if cluster.launcher == "local":
        return "cuda" if facts.gpus else "cpu"
    return "cuda" if cluster.slurm.gpus_per_node or cluster.slurm.gres else "cpu"


def _default_procs(spec: RunSpec, facts: MachineFacts, device: str) -> int:
    if entry(spec.strategy.name).single_process:
        return 1
    if device != "cuda":
        return 2
    return spec.cluster.slurm.gpus_per_node or len(facts.gpus) or 1


def _backend(spec: RunSpec, device: str) -> str:
    if spec.cluster.backend == "nccl" and device != "cuda":
        raise SpecError("cluster.backend is nccl, which needs GPUs; the device is cpu, so use gloo or auto")
    if spec.cluster.backend != "auto":
        return spec.cluster.backend
    return "nccl" if device == "cuda" else "gloo"


def _dtype(spec: RunSpec, device: str) -> str:
    wanted = spec.model.dtype if spec.model else "auto"
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" else "float32"


def _hosts(spec: RunSpec, facts: MachineFacts) -> list[str | None]:
    if spec.cluster.launcher == "local":
        return [facts.host]
    if spec.cluster.launcher == "hosts" and spec.cluster.hosts:
        return list(spec.cluster.hosts)
    return [None] * spec.cluster.nodes


def _rendezvous(spec: RunSpec) -> str:
    if spec.cluster.launcher == "local":
        return "a free port on 127.0.0.1, chosen when the ranks start"
    wanted = spec.cluster.rendezvous
    if spec.cluster.launcher == "hosts":
        first = wanted.address or (spec.cluster.hosts[0] if spec.cluster.hosts else "the first of cluster.hosts")
        return f"{first}, port {wanted.port or 'from the name of the run'}"
    address = wanted.address or "address asked from node 0"
    return f"{address}, port {wanted.port or 'from the job id, probed on node 0'}"
