"""The plan is a pure function of spec and facts: ranks, device, variables, batch, and what of it is secret."""

import re
from typing import Any

import msgspec
import pytest

from allranks.cli.plan import device_line
from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning import memory
from allranks.planning.env_vars import EnvVar
from allranks.planning.planner import make_plan, resolve_device
from allranks.planning.rank_environment import as_variables, public_variables, secret_variables, with_hidden_secrets
from allranks.planning.records import ON_NODE, PARTITION, REQUESTED, THIS_MACHINE, LaunchPlan
from allranks.planning.slurm_request import gpus_requested, parse_time_limit, partition_requested, takes_whole_nodes
from allranks.spec import RunSpec, parse_spec
from allranks.utils.machine import Gpu, MachineFacts
from allranks.utils.redaction import HIDDEN, redact_env

GPUS = [Gpu(index=i, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30) for i in range(8)]
RAW = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def facts(cpus: int = 8, gpus: int = 0) -> MachineFacts:
    return MachineFacts(host="n1", cpus=cpus, memory_bytes=2**34, gpus=GPUS[:gpus], cpu_model="x", system="Linux")


def plan(sets: list[str], **given: Any) -> LaunchPlan:
    return make_plan(parse_spec(RAW, sets), facts(**given))


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


def test_float8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**RAW, "adapter": {"type": "lora"}, "model": {"name": "tiny:mistral", "float8": True}}
    assert any("emulated" in w for w in make_plan(parse_spec(raw, []), facts()).warnings)
    assert not make_plan(parse_spec(raw, []), facts(gpus=1)).warnings
    with pytest.raises(SpecError, match=r"model.dtype is float32: its products on GPUs give bfloat16"):
        make_plan(parse_spec(raw, ["model.dtype=float32"]), facts(gpus=1))
    for name in ("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA A10G", "AMD Instinct MI300X"):
        monkeypatch.setitem(globals(), "GPUS", [Gpu(index=0, name=name, memory_bytes=2**36)])
        with pytest.raises(SpecError, match=f"has {name}, which has no 8-bit floats"):
            make_plan(parse_spec(raw, []), facts(gpus=1))


def test_threads_never_reach_zero_and_crowding_is_noted() -> None:
    made = plan(["cluster.procs_per_node=4"], cpus=2)
    assert as_variables(made.environment)["OMP_NUM_THREADS"] == "1"
    assert "4 ranks share 2 cores" in made.warnings[0]
    assert not plan(["cluster.procs_per_node=4", "cluster.launcher=slurm"], cpus=2).warnings, "nodes are no login node"


def test_the_user_wins_and_is_shown() -> None:
    made = plan(["cluster.env.OMP_NUM_THREADS=3", "cluster.env.FOO=bar"])
    by_name = {e.name: e for e in made.environment}
    threads = by_name["OMP_NUM_THREADS"]
    assert (threads.value, threads.source) == ("3", "user") and "would have set 4" in threads.reason
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
    ],
)
def test_options_that_contradict_the_plan_are_refused(option: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        plan(["cluster.launcher=slurm", option])
    for fine in ("mem=64G", "mem='0'", "extra=['--nodelist=n1', '--comment=x']"):
        plan(["cluster.launcher=slurm", f"cluster.slurm.{fine}"])


def test_a_time_limit_that_the_signal_eats_up_is_said() -> None:
    slurm = ["cluster.launcher=slurm", "cluster.slurm.time=00:03:00"]
    assert any("almost no time" in w for w in plan(slurm).warnings)
    assert not plan([*slurm, "cluster.slurm.signal_s=60"]).warnings
    assert not plan(["cluster.launcher=slurm"]).warnings


@pytest.mark.parametrize(("mode", "mapped"), [("none", 32 << 20), ("selective", 1 << 20), ("full", 1 << 20)])
def test_the_allocator_of_ranks_on_a_cpu(mode: str, mapped: int) -> None:
    """Unless the user sets it."""

    def tunables(cluster: dict[str, Any], gpus: int = 0) -> str | None:
        raw = {**RAW, "model": {"name": "tiny:mistral", "gradient_checkpointing": mode}, "cluster": cluster}
        return as_variables(memory.make_plan(parse_spec(raw), facts(gpus=gpus)).environment).get("GLIBC_TUNABLES")

    found = (tunables({"device": "cpu"}) or "").split(":")
    assert f"glibc.malloc.mmap_threshold={mapped}" in found and "glibc.malloc.hugetlb=1" in found
    assert ("glibc.malloc.trim_threshold=17179869184" in found) is (mode == "none")
    assert tunables({"device": "cpu", "env": {"GLIBC_TUNABLES": "glibc.malloc.check=1"}}) == "glibc.malloc.check=1"
    assert tunables({"device": "cuda"}, gpus=1) is None


def test_one_rank_a_gpu() -> None:
    made = plan([], gpus=8, cpus=64)
    assert (made.world_size, made.device, made.backend, made.dtype) == (8, "cuda", "nccl", "bfloat16")


def test_ranks_are_numbered_node_by_node() -> None:
    made = plan(["cluster.launcher=slurm", "cluster.nodes=3", "cluster.procs_per_node=2"])
    assert [row[:3] for row in made.rank_rows()] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)]


def spec_of(*sets: str, launcher: str = "slurm") -> RunSpec:
    return parse_spec(RAW, [f"cluster.launcher={launcher}", "cluster.nodes=2", *sets])


def plan_of(spec: RunSpec, partition_gpus: int | None = None, own_gpus: int = 0, **more: Any) -> LaunchPlan:
    return make_plan(spec, msgspec.structs.replace(facts(gpus=own_gpus), partition_gpus=partition_gpus, **more))


def shape(plan: LaunchPlan) -> tuple[str, str, str, int]:
    return plan.device, plan.backend, plan.dtype, plan.procs_per_node


@pytest.mark.parametrize("own_gpus", [0, 8])
@pytest.mark.parametrize(
    ("asked", "procs"),
    [
        ("cluster.slurm.gpus_per_node=4", 4), ("cluster.slurm.gres=gpu:a100:2", 2),
        ("cluster.slurm.gres='gpu:a100:2,gpu:v100:2,nvme:1'", 4), ("cluster.slurm.gres=gpu", 1),
        ("cluster.slurm.gres=shard:4", 1), ("cluster.slurm.extra=['--gres=gpu:h100:3']", 3),
        ("cluster.slurm.extra=['--gpus-per-node=h100:4']", 4), ("cluster.slurm.extra=['--gpus-per-task=4']", 4),
        ("cluster.slurm.extra=['--gpus=8']", 4), ("cluster.slurm.extra=['-G8']", 4),
        ("cluster.slurm.extra=['--gpus=a100:6']", 3),
    ],
)  # fmt: skip
def test_gpus_that_the_allocation_asks_for_decide_on_any_login_node(asked: str, procs: int, own_gpus: int) -> None:
    made = plan_of(spec_of(asked), own_gpus=own_gpus)
    assert shape(made) == ("cuda", "nccl", "bfloat16", procs)
    assert (made.device_source, made.world_size) == (REQUESTED, 2 * procs)


def test_a_count_that_an_option_leaves_open_comes_from_the_partition() -> None:
    spread = spec_of("cluster.slurm.extra=['--gpus=5']")
    assert gpus_requested(spread.cluster).per_node is None  # type: ignore[union-attr]
    assert plan_of(spread, partition_gpus=4).procs_per_node == 4
    assert plan_of(spec_of("cluster.slurm.extra=['--gpus-per-socket=2']")).procs_per_node == 1
    assert plan_of(spec_of("cluster.slurm.gpus_per_node=4", "cluster.procs_per_node=2")).procs_per_node == 2


@pytest.mark.parametrize("own_gpus", [0, 8])
def test_without_gpus_asked_for_the_plan_is_provisional_and_says_why(own_gpus: int) -> None:
    made = plan_of(spec_of("cluster.slurm.partition=gpu"), partition_gpus=8, own_gpus=own_gpus)
    assert shape(made) == ("cpu", "gloo", "float32", 2)
    assert made.device_source == ON_NODE and made.device_is_provisional
    assert device_line(made) == (
        "device auto: resolved on the node (the partition gpu has 8 GPUs per node, but the spec requests none: "
        "set cluster.slurm.gpus_per_node); planned for cpu until it is known"
    )
    assert msgspec.to_builtins(made)["device_source"] == "resolved on the node"
    silent = plan_of(spec_of(), own_gpus=own_gpus)
    assert silent.device_is_provisional
    assert "Slurm did not report whether the default partition has GPUs" in silent.device_reason
    named = plan_of(spec_of(), partition_gpus=1, partition="viavariable")
    assert "the partition viavariable has 1 GPU per node" in named.device_reason


def test_a_partition_without_gpus_and_whole_nodes_with_gpus_settle_it() -> None:
    none = plan_of(spec_of(), partition_gpus=0)
    assert (shape(none)[:2], none.device_source) == (("cpu", "gloo"), PARTITION)
    whole = plan_of(spec_of("cluster.slurm.exclusive=true"), partition_gpus=8)
    assert (shape(whole), whole.device_source) == (("cuda", "nccl", "bfloat16", 8), PARTITION)
    assert plan_of(spec_of("cluster.slurm.extra=['--exclusive=user']"), partition_gpus=8).device_is_provisional
    zero = plan_of(spec_of("cluster.slurm.gres=gpu:0"), partition_gpus=8)
    assert (zero.device, zero.device_source) == ("cpu", REQUESTED)


def test_launcher_hosts_uses_this_machines_gpus_only_if_it_is_one_of_them() -> None:
    mine = plan_of(spec_of("cluster.hosts=[n1, n2]", launcher="hosts"), own_gpus=4)
    assert (shape(mine), mine.device_source) == (("cuda", "nccl", "bfloat16", 4), THIS_MACHINE)
    assert plan_of(spec_of("cluster.hosts=[n1.lab.example, n2]", launcher="hosts"), own_gpus=4).device == "cuda"
    assert plan_of(spec_of("cluster.hosts=[n1, n2]", launcher="hosts")).device == "cpu"
    other = plan_of(spec_of("cluster.hosts=[n7, n8]", launcher="hosts"), own_gpus=4)
    assert (other.device, other.device_source) == ("cpu", ON_NODE)
    assert "n1, is not in cluster.hosts" in other.device_reason


def test_nodes_that_show_gpus_settle_a_provisional_plan() -> None:
    def settled(spec: RunSpec, partition_gpus: int | None = None, **gpus: int) -> LaunchPlan:
        found = resolve_device(spec, plan_of(spec, partition_gpus=partition_gpus), gpus)
        assert found is not None
        return make_plan(found, facts())

    spec = spec_of("cluster.slurm.partition=gpu")
    assert shape(settled(spec, 8, g1=8, g2=8)) == ("cuda", "nccl", "bfloat16", 8)
    assert settled(spec, 8, g1=8, g2=4).procs_per_node == 4
    assert settled(spec_of("cluster.procs_per_node=2"), g1=8, g2=8).procs_per_node == 2
    assert shape(settled(spec_of("cluster.backend=gloo"), g1=1, g2=1))[:2] == ("cuda", "gloo")
    assert settled(spec_of("cluster.nodes=1", "strategy.name=single"), g1=8).world_size == 1
    assert shape(settled(spec_of("cluster.slurm.exclusive=true"), 8, g1=0, g2=0)) == ("cpu", "gloo", "float32", 2)


def test_nodes_that_confirm_a_plan_or_do_not_answer_change_nothing() -> None:
    spec = spec_of()
    assert resolve_device(spec, plan_of(spec), {"g1": 0, "g2": 0}) is None
    assert resolve_device(spec, plan_of(spec), {}) is None, "no answer is no evidence of no GPUs"
    asked = spec_of("cluster.slurm.gpus_per_node=8")
    assert resolve_device(asked, plan_of(asked), {"g1": 0, "g2": 0}) is None, "the preflight names nodes that lack them"
    whole = spec_of("cluster.slurm.exclusive=true")
    assert resolve_device(whole, plan_of(whole, partition_gpus=8), {"g1": 8, "g2": 8}) is None


def test_nodes_that_differ_are_refused_by_name() -> None:
    spec = spec_of()
    with pytest.raises(EnvironmentNotAble, match=r"g1, g3 reported GPUs and g2 none"):
        resolve_device(spec, plan_of(spec), {"g1": 8, "g2": 0, "g3": 8})
    nccl = spec_of("cluster.backend=nccl")
    with pytest.raises(SpecError, match="backend is nccl"):
        resolve_device(nccl, plan_of(nccl), {"g1": 0, "g2": 0})


def test_options_of_sbatch_in_extra() -> None:
    def asked(*extra: str) -> RunSpec:
        return spec_of(f"cluster.slurm.extra={list(extra)}", "cluster.slurm.partition=cpu")

    assert partition_requested(spec_of().cluster) is None
    assert partition_requested(asked("--partition=gpu").cluster) == "gpu"
    assert partition_requested(asked("-pgpu").cluster) == "gpu"
    assert partition_requested(asked("--mail-type=END").cluster) == "cpu"
    assert takes_whole_nodes(asked("--exclusive").cluster)
    assert not takes_whole_nodes(asked("--nice").cluster)
    assert gpus_requested(asked("--gres=nvme:1", "--gpus-per-nothing=3").cluster) is None
    assert gpus_requested(asked("#SBATCH --gres=gpu:2").cluster).per_node == 2  # type: ignore[union-attr]


def test_a_variable_with_a_secret_in_its_value_is_hidden_whole_and_reaches_the_ranks_all_the_same() -> None:
    """Half of a proxy's address would be set for the ranks of a resumed run, and be of no use there."""
    env = {"HTTPS_PROXY": "http://me:pw@proxy:3128", "HF_TOKEN": "abc", "PLAIN": "http://proxy:3128"}
    assert redact_env(env) == {"HTTPS_PROXY": "***", "HF_TOKEN": "***", "PLAIN": "http://proxy:3128"}
    decided = [EnvVar(name=name, value=value, reason="cluster.env", source="user") for name, value in env.items()]
    assert public_variables(decided) == {"PLAIN": "http://proxy:3128"}
    assert secret_variables(decided).keys() == {"HTTPS_PROXY", "HF_TOKEN"}
    assert [item.value for item in with_hidden_secrets(decided)] == ["***", "***", "http://proxy:3128"]
    assert as_variables(with_hidden_secrets(decided)) == {"PLAIN": "http://proxy:3128"}  # the rest is the starter's own
