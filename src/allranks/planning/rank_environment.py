"""Decide the environment variables of the ranks, each with value, reason and source. Pure.

Network variables are decided in `network_policy`; some need facts from the nodes. No program of the user is imported.
"""

from __future__ import annotations

import json
import shlex

import msgspec

from allranks.errors import SpecError
from allranks.planning.env_vars import EnvVar
from allranks.planning.network_policy import NetworkJob, apply_user_env, provisional_policy
from allranks.spec.records import RunSpec, ScriptSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.redaction import HIDDEN, holds_secret, is_placeholder, redact, redact_arguments, redact_env

SCRIPT_ARGS = "ALLRANKS_SCRIPT_ARGS"
"""The arguments of a user's program as a JSON list, where spec.yaml has placeholders for the secret ones."""


def threads_per_rank(cpus: int, procs_per_node: int) -> int:
    """Return an equal share of the cores, at least one: more threads than cores slow down all ranks."""
    return max(1, cpus // procs_per_node)


def decide_environment(spec: RunSpec, job: NetworkJob, *, cpus: int, procs_per_node: int) -> list[EnvVar]:
    """Return the policy's variables; those of the user (``cluster.env``) take precedence and are shown."""
    decisions = [
        _threads(spec, cpus, procs_per_node),
        EnvVar("PYTHONUNBUFFERED", "1", "the last lines of a killed rank must not be lost"),
        EnvVar("PYTHONFAULTHANDLER", "1", "a crash in native code writes a Python stack to the rank's log"),
    ]
    reason = "one process prepares the data; forking after tokenizer threads have started can deadlock"
    decisions.append(EnvVar("TOKENIZERS_PARALLELISM", "false", reason))
    if spec.train.deterministic and job.device == "cuda":
        reason = "train.deterministic: cuBLAS is deterministic with a workspace of fixed size only"
        decisions.append(EnvVar("CUBLAS_WORKSPACE_CONFIG", ":4096:8", reason))
    if job.device == "cuda" and spec.script is None:  # a program of the user's own decides for itself
        decisions += [
            d for d in _gpu_decisions() if f"PYTORCH_CUDA_{d.name.removeprefix('PYTORCH_')}" not in spec.cluster.env
        ]
    if spec.cluster.cache:
        reason = "cluster.cache: one cache that all ranks share"
        decisions.append(EnvVar("HF_HOME", spec.cluster.cache, reason, source="spec"))
    if job.device == "cpu":
        needed = strategy_info(spec.strategy.name).cpu_environment
        decisions += [EnvVar(name, value, reason) for name, (value, reason) in needed.items()]
    decisions += provisional_policy(job)
    named = {item.name for item in decisions}
    rest = {name: value for name, value in spec.cluster.env.items() if name not in named}
    more = [EnvVar(name, value, "cluster.env", source="user") for name, value in rest.items()]
    if spec.script is not None and redact_arguments(spec.script.args) != spec.script.args:
        reason = "script.args as a JSON list: one of them is a secret, and spec.yaml contains no secrets"
        more.append(EnvVar(SCRIPT_ARGS, json.dumps(spec.script.args), reason, source="spec"))
    return [*apply_user_env(decisions, spec.cluster.env), *more]


TUNABLES = "GLIBC_TUNABLES"
MAPPED_BYTES = {False: 32 << 20, True: 1 << 20}
"""Bytes from which a CPU rank maps memory by itself and returns it when freed: without and with recomputation."""
KEPT_BYTES = 16 << 30


def with_allocator(decisions: list[EnvVar], *, device: str, recomputes: bool) -> list[EnvVar]:
    """Return the decisions, with the settings of glibc's allocator for ranks on a CPU."""
    if device != "cpu" or any(d.name == TUNABLES for d in decisions):
        return decisions
    settings = {"hugetlb": 1, "mmap_threshold": MAPPED_BYTES[recomputes]}
    if recomputes:
        reason = "huge pages; recomputed activations would fragment the heap, to several times their size"
        risk = "a step takes some per cent longer, because the kernel clears the pages of each large tensor"
    else:
        settings["trim_threshold"] = KEPT_BYTES
        reason = (
            "huge pages, and a heap that keeps what a step frees for the next step: about a tenth of the step's time"
        )
        risk = "other programs on the node do not get memory that a step has freed while the run goes on"
    value = ":".join(f"glibc.malloc.{name}={number}" for name, number in settings.items())
    link = "https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html"
    return [*decisions, EnvVar(TUNABLES, value, reason, documentation=link, risk=risk)]


NUMA_BINDING = "ALLRANKS_NUMA_BINDING"
"""Binds a rank to the cores beside its GPU (`allranks.train.distributed.bind_beside_gpu`); 0 turns it off."""


def _gpu_decisions() -> list[EnvVar]:
    """Return what a training on GPUs sets. TF32 stays off (docs/precision.md)."""
    link = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"
    return [
        EnvVar(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "sequences of many lengths fragment the memory of the GPU; segments that grow can be filled again",
            documentation=link,
            risk=(
                "tensors cannot be shared with other processes by CUDA IPC in older versions of torch; no training "
                "here does so"
            ),
        ),
        EnvVar(
            NUMA_BINDING,
            "1",
            (
                "a rank runs on the cores of its GPU's NUMA node, if the job has enough of them: copies do not cross "
                "sockets"
            ),
            risk="a node whose firmware names wrong cores is slower; 0 turns it off",
        ),
    ]


def script_arguments(script: ScriptSpec, environment: dict[str, str]) -> list[str]:
    """Return the arguments of a user's program, the secret ones from the environment.

    Args:
        script: the script section of spec.yaml.
        environment: environment of the process that runs the program.

    Raises:
        SpecError: an argument is a placeholder, and the environment has no value for it.
    """
    if not any(map(is_placeholder, script.args)):
        return list(script.args)
    try:
        given = json.loads(environment[SCRIPT_ARGS])
    except (KeyError, ValueError):
        given = None
    if isinstance(given, list) and all(isinstance(word, str) for word in given) and len(given) == len(script.args):
        return given
    index = next(i for i, word in enumerate(script.args) if is_placeholder(word))
    raise SpecError(
        f"script.args[{index}] is {script.args[index]!r}, a placeholder: a saved spec.yaml contains no secrets. Give "
        f"the value in the spec or with --set script.args=[...], or export {SCRIPT_ARGS} as a JSON list of all "
        f"{len(script.args)} arguments where the ranks are started"
    )


def without_secrets(spec: RunSpec) -> RunSpec:
    """Return the spec with placeholders for secret variables and arguments, safe to save."""
    cluster = msgspec.structs.replace(spec.cluster, env=redact_env(spec.cluster.env))
    args = redact_arguments(spec.script.args) if spec.script is not None else []
    script = None if spec.script is None else msgspec.structs.replace(spec.script, args=args)
    return msgspec.structs.replace(spec, cluster=cluster, script=script)


def secret_warnings(spec: RunSpec) -> list[str]:
    """Return a warning per shell line of the spec with a secret: batch script and spec.yaml keep it in plain text."""
    lines = [("cluster.setup", text) for text in spec.cluster.setup]
    lines += [("cluster.slurm.extra", text) for text in spec.cluster.slurm.extra]
    return [
        (
            f"{key}: {redact(text)!r} contains a secret, which spec.yaml and the batch script would save; set it in "
            "cluster.env instead"
        )
        for key, text in lines
        if redact(text) != text
    ]


def _threads(spec: RunSpec, cpus: int, procs_per_node: int) -> EnvVar:
    name, given = "OMP_NUM_THREADS", spec.cluster.slurm.cpus_per_task
    runs_here, ranks = spec.cluster.launched_by.runs_here, f"{procs_per_node} rank{'s' * (procs_per_node != 1)}"
    if runs_here or given:
        cores, what = (cpus, "usable cores") if runs_here else (given or 1, "cpus_per_task")
        value = str(threads_per_rank(cores, procs_per_node))
        why = f"{cores} {what} / {ranks} on the node; torchrun would set 1, plain Python all cores for every rank"
        return EnvVar(name, value, why)
    return EnvVar(name, None, f"its usable cores / {ranks}", source="nodes")


def as_variables(decisions: list[EnvVar]) -> dict[str, str]:
    """Return the variables to set; those with redacted values come from the environment of the starting process."""
    return {item.name: item.value for item in decisions if item.value is not None and item.value != HIDDEN}


def public_variables(decisions: list[EnvVar]) -> dict[str, str]:
    """Return variables that may be written to a script or terminal."""
    return {name: value for name, value in as_variables(decisions).items() if not _is_secret(name, value)}


def secret_variables(decisions: list[EnvVar]) -> dict[str, str]:
    """Return variables that reach the ranks only through the environment of the starting process, never a file."""
    return {name: value for name, value in as_variables(decisions).items() if _is_secret(name, value)}


def with_hidden_secrets(decisions: list[EnvVar]) -> list[EnvVar]:
    """Return the decisions with redacted secrets, safe to show and save."""
    return [
        msgspec.structs.replace(item, value=HIDDEN) if item.value and _is_secret(item.name, item.value) else item
        for item in decisions
    ]


def _is_secret(name: str, value: str) -> bool:
    return name == SCRIPT_ARGS or holds_secret(name, value)


def command_line(script: ScriptSpec) -> str:
    """Return the program as a shell command, with placeholders for secret arguments."""
    program = [script.path] if script.path is not None else ["-m", script.module or ""]
    return shlex.join(["python", *program, *redact_arguments(script.args)])
