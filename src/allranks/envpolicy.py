"""Environment of the ranks: each variable with its value, its reason and who decided it. Pure.

What concerns the network stands in `fabric`: some of it can be decided only when the nodes have been asked.
"""

from __future__ import annotations

import msgspec

from allranks.fabric.decision import EnvVar
from allranks.fabric.job import Job
from allranks.fabric.policy import before_nodes, user_wins
from allranks.redact import HIDDEN, holds_secret
from allranks.spec.records import RunSpec


def threads_per_rank(cpus: int, procs_per_node: int) -> int:
    """Cores shared out evenly, at least one: more threads than cores slows every rank down."""
    return max(1, cpus // procs_per_node)


def decide(spec: RunSpec, job: Job, *, cpus: int, procs_per_node: int) -> list[EnvVar]:
    """The policy, with what the user set (``cluster.env``) winning and shown."""
    threads = _threads(spec, cpus, procs_per_node)
    decisions = [
        threads,
        EnvVar(name="PYTHONUNBUFFERED", value="1", reason="a rank that is killed must not take its last lines with it"),
        EnvVar(
            name="PYTHONFAULTHANDLER",
            value="1",
            reason="a crash in native code leaves a Python stack in the rank's log",
        ),
        EnvVar(
            name="TOKENIZERS_PARALLELISM",
            value="false",
            reason="data is prepared by one builder, not forked from a tokenizer's threads",
        ),
    ]
    if spec.cluster.cache:
        decisions.append(
            EnvVar(
                name="HF_HOME",
                value=spec.cluster.cache,
                reason="cluster.cache: one cache that all ranks share",
                source="spec",
            )
        )
    if job.device == "cpu" and spec.strategy.name.startswith("deepspeed_"):
        decisions.append(
            EnvVar(
                name="DS_ACCELERATOR",
                value="cpu",
                reason="the ranks compute on the CPU; DeepSpeed would take a GPU that it sees",
            )
        )
    decisions += before_nodes(job)
    named = {item.name for item in decisions}
    rest = {name: value for name, value in spec.cluster.env.items() if name not in named}
    more = [EnvVar(name=k, value=v, reason="cluster.env", source="user") for k, v in rest.items()]
    return [*user_wins(decisions, spec.cluster.env), *more]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _threads(spec: RunSpec, cpus: int, procs_per_node: int) -> EnvVar:
    name, given = "OMP_NUM_THREADS", spec.cluster.slurm.cpus_per_task
    if spec.cluster.launcher == "local" or given:
        cores, what = (cpus, "usable cores") if spec.cluster.launcher == "local" else (given or 1, "cpus_per_task")
        value = str(threads_per_rank(cores, procs_per_node))
        why = f"{cores} {what} / {_ranks(procs_per_node)} on the node; torchrun would set 1, plain Python all cores for every rank"
        return EnvVar(name=name, value=value, reason=why)
    return EnvVar(name=name, value=None, reason=f"its usable cores / {_ranks(procs_per_node)}", source="nodes")


__all__ = ["EnvVar", "decide", "environment", "hidden", "secrets", "threads_per_rank", "without_secrets"]


def environment(decisions: list[EnvVar]) -> dict[str, str]:
    """The variables to set; one whose value was hidden in a file is left to the environment of whoever starts."""
    return {item.name: item.value for item in decisions if item.value is not None and item.value != HIDDEN}


def without_secrets(decisions: list[EnvVar]) -> dict[str, str]:
    """What may stand in a script or on a terminal."""
    return {name: value for name, value in environment(decisions).items() if not holds_secret(name, value)}


def secrets(decisions: list[EnvVar]) -> dict[str, str]:
    """What reaches the ranks through the environment of whoever starts them, and no file."""
    return {name: value for name, value in environment(decisions).items() if holds_secret(name, value)}


def hidden(decisions: list[EnvVar]) -> list[EnvVar]:
    """The decisions as they may be shown and kept."""
    return [
        msgspec.structs.replace(item, value=HIDDEN) if item.value and holds_secret(item.name, item.value) else item
        for item in decisions
    ]
