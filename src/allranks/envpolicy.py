"""Environment of the ranks: each variable with its value, its reason and who decided it. Pure."""

from __future__ import annotations

import msgspec

from allranks.redact import HIDDEN, is_secret_name
from allranks.spec.records import RunSpec


class EnvVar(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. ``value`` None means: looked at, and left alone on purpose."""

    name: str
    value: str | None
    reason: str
    source: str = "policy"


def threads_per_rank(cpus: int, procs_per_node: int) -> int:
    """Cores shared out evenly, at least one: more threads than cores slows every rank down."""
    return max(1, cpus // procs_per_node)


def decide(spec: RunSpec, *, device: str, cpus: int, procs_per_node: int, nodes: int) -> list[EnvVar]:
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
    if device == "cpu" and spec.strategy.name.startswith("deepspeed_"):
        decisions.append(
            EnvVar(
                name="DS_ACCELERATOR",
                value="cpu",
                reason="the ranks compute on the CPU; DeepSpeed would take a GPU that it sees",
            )
        )
    decisions += _network(spec, device=device, nodes=nodes)
    return _user_wins(decisions, spec.cluster.env)


def _threads(spec: RunSpec, cpus: int, procs_per_node: int) -> EnvVar:
    name, given = "OMP_NUM_THREADS", spec.cluster.slurm.cpus_per_task
    if spec.cluster.launcher == "local" or given:
        cores, what = (cpus, "usable cores") if spec.cluster.launcher == "local" else (given or 1, "cpus_per_task")
        value = str(threads_per_rank(cores, procs_per_node))
        why = f"{cores} {what} / {procs_per_node} ranks on the node; torchrun would set 1, plain Python all cores for every rank"
        return EnvVar(name=name, value=value, reason=why)
    return EnvVar(name=name, value=None, reason=f"decided on each node: its usable cores / {procs_per_node} ranks")


def _network(spec: RunSpec, *, device: str, nodes: int) -> list[EnvVar]:
    interface = spec.cluster.rendezvous.interface
    if interface:
        reason = "cluster.rendezvous.interface"
        found = [EnvVar(name="GLOO_SOCKET_IFNAME", value=interface, reason=reason, source="spec")]
        if device == "cuda":
            found.append(
                EnvVar(
                    name="NCCL_SOCKET_IFNAME",
                    value=f"={interface}",
                    reason=reason + " ('=' means exactly this name)",
                    source="spec",
                )
            )
        return found
    if nodes == 1:
        gloo = EnvVar(
            name="GLOO_SOCKET_IFNAME",
            value="lo",
            reason="one node: Gloo would look the host name up, which fails or waits for DNS on many laptops",
        )
        if device != "cuda":
            return [gloo]
        return [
            gloo,
            EnvVar(name="NCCL_SOCKET_IFNAME", value=None, reason="one node: NCCL finds its own way between local GPUs"),
        ]
    return [
        EnvVar(
            name="GLOO_SOCKET_IFNAME", value=None, reason="several nodes: decided on each node from its own interfaces"
        )
    ]


def _user_wins(decisions: list[EnvVar], user: dict[str, str]) -> list[EnvVar]:
    kept = []
    for item in decisions:
        if item.name in user:
            why = f"cluster.env (the policy would have {'left it alone' if item.value is None else 'set ' + item.value}: {item.reason})"
            kept.append(EnvVar(name=item.name, value=user[item.name], reason=why, source="user"))
        else:
            kept.append(item)
    named = {item.name for item in decisions}
    kept += [EnvVar(name=k, value=v, reason="cluster.env", source="user") for k, v in user.items() if k not in named]
    return kept


def environment(decisions: list[EnvVar]) -> dict[str, str]:
    """The variables to set; one whose value was hidden in a file is left to the environment of whoever starts."""
    return {item.name: item.value for item in decisions if item.value is not None and item.value != HIDDEN}


def without_secrets(decisions: list[EnvVar]) -> dict[str, str]:
    """What may stand in a script or on a terminal."""
    return {name: value for name, value in environment(decisions).items() if not is_secret_name(name)}
