"""Records of a plan: ranks on nodes, batch, device, hang limits. Pure, no torch."""

from __future__ import annotations

import msgspec

from allranks.planning.env_vars import EnvVar
from allranks.rundir.files import UNVERSIONED


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Number of sequences in one optimizer step."""

    micro_batch_size: int
    grad_accum: int
    global_batch_size: int


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One node and its ranks; host is None until the scheduler assigns it."""

    node: int
    host: str | None
    ranks: list[int]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is decided before it starts."""

    run_name: str
    launcher: str
    strategy: str
    strategy_options: dict[str, object]
    device: str
    backend: str
    dtype: str
    """Precision of compute and of frozen weights."""
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
    param_dtype: str = "float32"
    """Storage of trained weights and optimizer state."""
    device_source: str = ""
    """What decided the device: a constant of `allranks.planning.planner`."""
    device_reason: str = ""
    """The same as a phrase, with the spec key or machine fact."""
    replication: str = ""
    """Whether weights are replicated between nodes, and why; empty on one node, and for strategies that cannot."""
    recomputation: str = "none"
    """Activations that are recomputed in backward: none | selective | full."""
    recomputation_reason: str = ""
    """Why, if ``model.gradient_checkpointing`` is auto."""
    rank_memory_bytes: int | None = None
    """Estimated peak memory per rank; None if unknown, or if `--force` was given."""
    hang: Limits | None = None
    """How long ranks may be silent; None if hangs are not monitored."""
    grace_s: float | None = None
    """For a user's own program: seconds from SIGTERM, which a stop sends, to SIGKILL."""
    schema_version: int = UNVERSIONED
    """`SCHEMA_VERSION` in new plans. The default is for files that were written before there were versions."""

    @property
    def device_is_provisional(self) -> bool:
        """Return whether the device depends on GPUs that the nodes have not yet reported (`resolve_device`)."""
        return self.device_source == ON_NODE

    @property
    def shard_ranks(self) -> int:
        """Return over how many ranks a strategy that shards does so: those of a node under HSDP, else all."""
        return self.procs_per_node if self.strategy_options.get("replicate") == "nodes" else self.world_size

    @property
    def work(self) -> str:
        """Return strategy, backend, device and dtype as text; strategy and dtype are unknown for a user's own program."""
        if self.batch is None:
            return f"your own program, {self.backend} on {self.device}"
        stored = f", {self.param_dtype} trained weights" if self.is_mixed else ""
        return f"{self.strategy}, {self.backend} on {self.device}, {self.dtype}{stored}"

    @property
    def is_mixed(self) -> bool:
        """Return whether trained weights are stored in another dtype than that of compute."""
        return self.batch is not None and self.dtype != self.param_dtype

    def rank_rows(self) -> list[tuple[int, int, int, str]]:
        """Return (rank, node, local rank, host) for every rank."""
        return [(r, n.node, i, n.host or f"node {n.node}") for n in self.nodes for i, r in enumerate(n.ranks)]


REQUESTED = "asked"
"""The spec names the device, or its allocation requests GPUs."""


THIS_MACHINE = "this machine"


PARTITION = "partition"
"""The GPUs of the nodes of the partition."""


ON_NODE = "resolved on the node"
"""Provisional: the plan is for the CPU until the nodes report their GPUs."""


class DeviceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of a plan."""

    device: str
    source: str
    """One of `ASKED`, `MACHINE`, `PARTITION`, `ON_NODE`."""
    reason: str
    gpus: int | None = None
    """GPUs of each node; None if unknown."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Hang limits: ``step_s`` within training steps, ``long_s`` in other phases."""

    step_s: float
    long_s: float
