"""Which GPU a rank gets, or why it gets none: NVIDIA, MIG, AMD, a build of torch for another device. No GPU is
needed."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.errors import EnvironmentNotAble
from allranks.nodes.checks import PlanRequirements
from allranks.nodes.probes import probe
from allranks.nodes.records import Package
from allranks.planning.env_vars import MULTI_RANK_GPU
from allranks.planning.planner import make_plan
from allranks.planning.rank_environment import NUMA_BINDING
from allranks.spec import parse_spec
from allranks.train.checkpoint.saver import Saver
from allranks.train.distributed import SINGLE_PROCESS, bind_beside_gpu, gpu_of, narrow_to_own_mig, why_no_gpu
from allranks.utils.machine import AMD_FILTERS, Gpu, amd_gpus, visible_gpus
from tests.unit.preflight_nodes import failures, node, survey
from tests.unit.test_plan import facts

SMI = """#!/bin/sh
case "$1" in
-L) cat <<'END'
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 3g.20gb     Device  0: (UUID: MIG-aa)
  MIG 1g.5gb      Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77)
END
;;
*) echo "0, GPU-5d5ba0d6, NVIDIA A100-SXM4-40GB, 40960, Enabled"; echo "1, GPU-77, NVIDIA A100-SXM4-40GB, 40960, Disabled";;
esac
"""


@pytest.fixture(autouse=True)
def _no_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*AMD_FILTERS, MULTI_RANK_GPU):
        monkeypatch.delenv(name, raising=False)


def test_each_rank_has_its_own_gpu_and_too_few_are_refused_under_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu_of(rank, 4, 8, "nccl") for rank in range(4)] == [0, 1, 2, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # --gpus-per-task=1
    with pytest.raises(
        EnvironmentNotAble, match=r"8 ranks of this node see 1 GPU \(CUDA_VISIBLE_DEVICES=0\).*gpus_per_node: 8"
    ):
        gpu_of(3, 8, 1, "nccl")
    with pytest.raises(EnvironmentNotAble, match="see 4 GPUs"):
        gpu_of(5, 8, 4, "nccl")
    assert [gpu_of(rank, 4, 2, "gloo") for rank in range(4)] == [0, 1, 0, 1] and gpu_of(0, 1, 1, "nccl") == 0


def test_a_cpu_build_and_a_hidden_gpu_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch 2.13.0+cpu is a build for CPUs" in why_no_gpu("2.13.0+cpu", None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "built for CUDA 13.0 (NVIDIA), finds none" in why_no_gpu("2.13.0", "13.0", None)
    assert "(CUDA_VISIBLE_DEVICES=)" in why_no_gpu("2.13.0", "13.0", None)
    assert "ROCm 6.4 (AMD)" in why_no_gpu("2.13.0+rocm6.4", None, "6.4")


def test_ranks_on_mig_have_an_instance_each_or_are_refused() -> None:
    places = []
    for rank in range(2):
        own = {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}
        assert narrow_to_own_mig(rank, own) == 2
        places.append((own["CUDA_VISIBLE_DEVICES"], gpu_of(rank, 2, 1, "gloo", 2)))
    assert places == [("MIG-aa", 0), ("MIG-bb", 0)]
    whole = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert narrow_to_own_mig(1, whole) == 0 and whole == {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(EnvironmentNotAble, match="2 MIG instances, and NCCL refuses"):
        gpu_of(1, 2, 1, "nccl", 2)
    os.environ[MULTI_RANK_GPU] = "1"
    try:
        assert gpu_of(1, 2, 1, "nccl", 2) == 0
        with pytest.raises(EnvironmentNotAble):
            gpu_of(1, 2, 1, "nccl", 1)  # both would use one instance
    finally:
        del os.environ[MULTI_RANK_GPU]


def test_mig_instances_take_the_place_of_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def seen(variable: str | None) -> list[str]:
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        return [gpu.name.removeprefix("NVIDIA A100-SXM4-40GB") for gpu in visible_gpus()]

    assert seen(None) == [" MIG 3g.20gb", " MIG 1g.5gb", ""] and seen("1") == [""]
    assert seen("MIG-bb") == [" MIG 1g.5gb"]
    assert visible_gpus() == [Gpu(index=0, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", memory_bytes=5 * 10**9)]
    assert seen("") == []


@pytest.fixture
def amd(tmp_path: Path) -> tuple[Path, Path]:
    """The kernel's list of a node with a CPU and three GPUs, of which one may not be opened."""
    nodes, devices = tmp_path / "nodes", tmp_path / "dri"
    devices.mkdir()
    for place, properties in enumerate(
        [
            "cpu_cores_count 96\nsimd_count 0\ndrm_render_minor 0",
            *(
                f"simd_count 1216\ngfx_target_version 90402\ndrm_render_minor {128 + i}\nunique_id {i + 1}"
                for i in range(3)
            ),
        ]
    ):
        (nodes / str(place) / "mem_banks" / "0").mkdir(parents=True)
        (nodes / str(place) / "properties").write_text(properties)
        (nodes / str(place) / "mem_banks" / "0" / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    for minor in (128, 130):
        (devices / f"renderD{minor}").touch()
    return nodes, devices


def test_amd_gpus_are_seen_with_their_memory_and_filters(
    amd: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert amd_gpus(*amd) == [Gpu(index=i, name="AMD gfx942", memory_bytes=206141652992) for i in range(2)]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert len(amd_gpus(*amd)) == 1
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")  # numbers what the other leaves
    assert amd_gpus(*amd) == []
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-0000000000000003")
    assert len(amd_gpus(*amd)) == 1
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    nodes, devices = map(str, amd)
    assert [(g["index"], g["name"], g["memory_mb"]) for g in probe.amd(nodes, devices)] == [
        (str(i), gpu.name, str(gpu.memory_bytes >> 20)) for i, gpu in enumerate(amd_gpus(*amd))
    ]


@pytest.mark.parametrize(
    ("version", "gpu", "fails"),
    [
        ("2.13.0+cpu", "NVIDIA H100", True), ("2.13.0+cpu", "AMD Instinct MI300X", True),
        ("2.13.0+rocm6.4", "NVIDIA H100", True), ("2.13.0+cu130", "AMD Instinct MI300X", True),
        ("2.13.0+rocm6.4", "AMD Instinct MI300X", False), ("2.13.0", "NVIDIA H100", False),
    ],
)  # fmt: skip
def test_a_build_of_torch_for_another_device_is_refused_before_the_start(version: str, gpu: str, fails: bool) -> None:
    gpus: list[dict[str, Any]] = [{"index": "0", "name": gpu, "driver": "1"}]
    one = node(1, gpus=gpus, packages={**node(1).packages, "torch": Package(version=version, origin="/x")})
    found = failures(survey(one, need=PlanRequirements(device="cuda")))
    assert ("n1.torch" in found) is fails
    assert "n1.torch" not in failures(survey(one, need=PlanRequirements(device="cpu")))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_rank_is_bound_to_the_cores_beside_its_gpu(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    for bus, cores in (("0000:1b:00.0", f"{one},100000-100003"), ("0000:1c:00.0", "100000"), ("0000:1d:00.0", "odd")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(cores + "\n")
    asked = {NUMA_BINDING: "1", "OMP_NUM_THREADS": "1"}
    try:
        for bus, environment in (
            ("0000:1C:00.0", asked),  # none of its cores is the job's
            ("0000:1d:00.0", asked),
            ("0000:1e:00.0", asked),
            ("0000:1B:00.0", {**asked, NUMA_BINDING: "0"}),
            ("0000:1B:00.0", {**asked, "OMP_NUM_THREADS": "2"}),  # fewer cores than threads
        ):
            assert bind_beside_gpu(bus, environment, tmp_path) == set() and os.sched_getaffinity(0) == before
        assert bind_beside_gpu("0000:1B:00.0", asked, tmp_path) == os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)


def test_a_training_on_gpus_sets_its_allocator_and_binding_with_reasons() -> None:
    raw = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    here = facts(gpus=2)
    decided = {item.name: item for item in make_plan(parse_spec(raw), here).environment}
    assert decided["PYTORCH_ALLOC_CONF"].value == "expandable_segments:True"
    assert decided[NUMA_BINDING].value == "1"
    own = parse_spec(raw, ["cluster.env.PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64'"])  # the older name
    assert "PYTORCH_ALLOC_CONF" not in {item.name for item in make_plan(own, here).environment}
    off = parse_spec(raw, [f"cluster.env.{NUMA_BINDING}='0'"])
    assert {i.name: i.value for i in make_plan(off, here).environment}[NUMA_BINDING] == "0"
    for other in (make_plan(parse_spec(raw), facts()), make_plan(parse_spec({"script": {"path": "x.py"}}), here)):
        assert "PYTORCH_ALLOC_CONF" not in {item.name for item in other.environment}


def test_the_thread_that_writes_a_checkpoint_has_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: seen.append((threading.current_thread().name, d)))
    saver = Saver.__new__(Saver)
    saver.world = dataclasses.replace(SINGLE_PROCESS, device=torch.device("cuda", 3))
    saver._together = SimpleNamespace(meet=lambda what: None)  # type: ignore[assignment]
    monkeypatch.setattr(Saver, "_write", lambda self, *a: seen.append(("written", torch.device("cpu"))))
    monkeypatch.setattr(Saver, "_complete", lambda self, *a: seen.append(("published", torch.device("cpu"))))
    thread = threading.Thread(
        target=saver._save_in_background, args=(SimpleNamespace(step=1), None, 0.0), name="checkpoint"
    )
    thread.start()
    thread.join()
    assert [what for what, _ in seen] == ["checkpoint", "written", "published"] and seen[0][1] == torch.device(
        "cuda", 3
    )
