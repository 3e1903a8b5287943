"""What decides the device: the allocation, not the machine that plans."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allranks.cli.plan import device_line
from allranks.errors import EnvironmentNotAble, SpecError
from allranks.planning.planner import make_plan, resolve_device
from allranks.planning.records import ON_NODE, PARTITION, REQUESTED, THIS_MACHINE, LaunchPlan
from allranks.planning.slurm_request import gpus_requested, partition_requested, takes_whole_nodes
from allranks.spec import RunSpec, parse_spec
from tests.unit.test_plan import facts

RAW = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


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
        ("cluster.slurm.gpus_per_node=4", 4),
        ("cluster.slurm.gres=gpu:4", 4),
        ("cluster.slurm.gres=gpu:a100:2", 2),
        ("cluster.slurm.gres='gpu:a100:2,gpu:v100:2,nvme:1'", 4),
        ("cluster.slurm.gres=gpu", 1),
        ("cluster.slurm.gres=shard:4", 1),
        ("cluster.slurm.extra=['--gres=gpu:h100:3']", 3),
        ("cluster.slurm.extra=['--gpus-per-node=h100:4']", 4),
        ("cluster.slurm.extra=['--gpus-per-task=4']", 4),
        ("cluster.slurm.extra=['--gpus=8']", 4),
        ("cluster.slurm.extra=['-G8']", 4),
        ("cluster.slurm.extra=['--gpus=a100:6']", 3),
    ],
)
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
    spec = spec_of("cluster.slurm.partition=gpu")
    before = plan_of(spec, partition_gpus=8)
    settled = resolve_device(spec, before, {"g1": 8, "g2": 8})
    assert settled is not None
    assert shape(make_plan(settled, facts())) == ("cuda", "nccl", "bfloat16", 8)
    fewer = resolve_device(spec, before, {"g1": 8, "g2": 4})
    assert fewer is not None and fewer.cluster.procs_per_node == 4
    own = spec_of("cluster.procs_per_node=2")
    kept = resolve_device(own, plan_of(own), {"g1": 8, "g2": 8})
    assert kept is not None and make_plan(kept, facts()).procs_per_node == 2
    gloo = spec_of("cluster.backend=gloo")
    shared = resolve_device(gloo, plan_of(gloo), {"g1": 1, "g2": 1})
    assert shared is not None and shape(make_plan(shared, facts()))[:2] == ("cuda", "gloo")
    alone = spec_of("cluster.nodes=1", "strategy.name=single")
    one = resolve_device(alone, plan_of(alone), {"g1": 8})
    assert one is not None and make_plan(one, facts()).world_size == 1


def test_nodes_that_confirm_a_plan_or_do_not_answer_change_nothing() -> None:
    spec = spec_of()
    assert resolve_device(spec, plan_of(spec), {"g1": 0, "g2": 0}) is None
    assert resolve_device(spec, plan_of(spec), {}) is None, "no answer is no evidence of no GPUs"
    asked = spec_of("cluster.slurm.gpus_per_node=8")
    assert resolve_device(asked, plan_of(asked), {"g1": 0, "g2": 0}) is None, "the preflight names nodes that lack them"
    whole = spec_of("cluster.slurm.exclusive=true")
    assert resolve_device(whole, plan_of(whole, partition_gpus=8), {"g1": 8, "g2": 8}) is None
    bare = resolve_device(whole, plan_of(whole, partition_gpus=8), {"g1": 0, "g2": 0})
    assert bare is not None and shape(make_plan(bare, facts())) == ("cpu", "gloo", "float32", 2)


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
