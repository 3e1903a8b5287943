"""The plan is a pure function of spec and facts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning import memory
from allranks.planning.env_vars import EnvVar
from allranks.planning.planner import make_plan
from allranks.planning.rank_environment import as_variables
from allranks.planning.records import LaunchPlan
from allranks.planning.slurm_request import parse_time_limit
from allranks.spec import parse_spec
from allranks.utils.machine import Gpu, MachineFacts
from allranks.utils.redaction import HIDDEN

GPUS = [Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30) for i in range(8)]


def facts(cpus: int = 8, gpus: int = 0) -> MachineFacts:
    return MachineFacts(host="n1", cpus=cpus, memory_bytes=2**34, gpus=GPUS[:gpus], cpu_model="x", system="Linux")


def plan(sets: list[str], **given: Any) -> LaunchPlan:
    raw = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    return make_plan(parse_spec(raw, sets), facts(**given))


def test_two_ranks_on_a_machine_without_gpu() -> None:
    made = plan([])
    assert (made.world_size, made.device, made.backend, made.dtype) == (2, "cpu", "gloo", "float32")
    assert as_variables(made.environment)["OMP_NUM_THREADS"] == "4"
    assert as_variables(made.environment)["GLOO_SOCKET_IFNAME"] == "lo"


def test_more_ranks_than_gpus_is_refused_but_may_share_over_gloo() -> None:
    with pytest.raises(SpecError, match="has 2 GPUs"):
        plan(["cluster.procs_per_node=3"], gpus=2)
    assert plan(["cluster.procs_per_node=3", "cluster.backend=gloo"], gpus=2).backend == "gloo"


def test_cuda_without_gpu_and_nccl_without_cuda_are_refused() -> None:
    with pytest.raises(EnvironmentNotAble, match="has no GPU"):
        plan(["cluster.device=cuda"])
    with pytest.raises(SpecError, match="needs GPUs"):
        plan(["cluster.backend=nccl"])


def test_threads_never_reach_zero_and_crowding_is_noted() -> None:
    made = plan(["cluster.procs_per_node=4"], cpus=2)
    assert as_variables(made.environment)["OMP_NUM_THREADS"] == "1"
    assert "4 ranks share 2 cores" in made.warnings[0]
    assert not plan(["cluster.procs_per_node=4", "cluster.launcher=slurm"], cpus=2).warnings, "nodes are no login node"


def test_the_user_wins_and_is_shown() -> None:
    made = plan(["cluster.env.OMP_NUM_THREADS=3", "cluster.env.FOO=bar"])
    by_name = {e.name: e for e in made.environment}
    assert by_name["OMP_NUM_THREADS"].value == "3"
    assert by_name["OMP_NUM_THREADS"].source == "user"
    assert "would have set 4" in by_name["OMP_NUM_THREADS"].reason
    assert by_name["FOO"].value == "bar" and all(e.reason for e in made.environment)
    hidden = as_variables([*made.environment, EnvVar(name="A_TOKEN", value=HIDDEN, reason="a file hides it")])
    assert hidden["FOO"] == "bar"
    assert "A_TOKEN" not in hidden, "whoever starts has it"


def test_batch_arithmetic() -> None:
    made = plan(["train.global_batch_size=16", "train.micro_batch_size=2"])
    assert made.batch is not None
    assert (made.batch.grad_accum, made.batch.global_batch_size) == (4, 16)
    with pytest.raises(SpecError, match=r"not divisible.*the nearest valid value: 8 or 12"):
        plan(["train.global_batch_size=10", "train.micro_batch_size=2"])
    with pytest.raises(SpecError, match=r"the nearest valid value: 4$"):
        plan(["train.global_batch_size=3", "train.micro_batch_size=2"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-0", 172800), ("2-1:30", 178200), ("2-1:30:05", 178205),
        ("UNLIMITED", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_time_limits_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cluster.slurm.extra=['--nodes=1']", "cluster.slurm.extra --nodes=1: contradicts the plan; set cluster.nodes"),
        ("cluster.slurm.extra=['#SBATCH -N 1']", "cluster.slurm.extra #SBATCH -N 1: contradicts the plan"),
        ("cluster.slurm.extra=['--ntasks-per-node=4']", "set cluster.procs_per_node instead"),
        ("cluster.slurm.mem='64'", "cluster.slurm.mem 64: 64MiB for all ranks of a node"),
        ("cluster.slurm.mem=100M", "cluster.slurm.mem 100M: 100MiB"),
        ("cluster.slurm.mem=64G", None),
        ("cluster.slurm.mem='0'", None),
        ("cluster.slurm.extra=['--nodelist=n1', '--comment=x']", None),
    ],
)
def test_options_that_contradict_the_plan_are_refused(option: str, words: str | None) -> None:
    if words is None:
        plan(["cluster.launcher=slurm", option])
        return
    with pytest.raises(SpecError, match=re.escape(words)):
        plan(["cluster.launcher=slurm", option])


def test_a_time_limit_that_the_signal_eats_up_is_said() -> None:
    slurm = ["cluster.launcher=slurm", "cluster.slurm.time=00:03:00"]
    assert any("almost no time" in w for w in plan(slurm).warnings)
    assert not plan([*slurm, "cluster.slurm.signal_s=60"]).warnings
    assert not plan(["cluster.launcher=slurm"]).warnings


@pytest.mark.parametrize(("mode", "mapped"), [("none", 32 << 20), ("selective", 1 << 20), ("full", 1 << 20)])
def test_the_allocator_of_ranks_on_a_cpu(mode: str, mapped: int) -> None:
    """Unless the user sets it."""
    raw = {
        "model": {"name": "tiny:mistral", "gradient_checkpointing": mode},
        "data": {"source": "builtin:instructions"},
        "cluster": {"device": "cpu"},
    }
    found = as_variables(memory.make_plan(parse_spec(raw), facts()).environment)["GLIBC_TUNABLES"].split(":")
    assert f"glibc.malloc.mmap_threshold={mapped}" in found and "glibc.malloc.hugetlb=1" in found
    assert ("glibc.malloc.trim_threshold=17179869184" in found) is (mode == "none")
    raw["cluster"] = {"device": "cpu", "env": {"GLIBC_TUNABLES": "glibc.malloc.check=1"}}
    own = as_variables(memory.make_plan(parse_spec(raw), facts()).environment)
    assert own["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    raw["cluster"] = {"device": "cuda"}
    assert "GLIBC_TUNABLES" not in as_variables(memory.make_plan(parse_spec(raw), facts(gpus=1)).environment)


def test_one_rank_a_gpu() -> None:
    made = plan([], gpus=8, cpus=64)
    assert (made.world_size, made.device, made.backend, made.dtype) == (8, "cuda", "nccl", "bfloat16")


def test_ranks_are_numbered_node_by_node() -> None:
    made = plan(["cluster.launcher=slurm", "cluster.nodes=3", "cluster.procs_per_node=2"])
    assert [row[:3] for row in made.rank_rows()] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)]
