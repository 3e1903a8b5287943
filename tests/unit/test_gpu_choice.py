"""Which GPU a rank gets, or why it gets none: NVIDIA, MIG, AMD, a torch for another device. Needs no GPU."""

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

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
*)
echo "0, GPU-5d5ba0d6, NVIDIA A100-SXM4-40GB, 40960, Enabled"
echo "1, GPU-77, NVIDIA A100-SXM4-40GB, 40960, Disabled";;
esac
"""


@pytest.fixture(autouse=True)
def _no_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*AMD_FILTERS, MULTI_RANK_GPU):
        monkeypatch.delenv(name, raising=False)


def test_each_rank_has_its_own_gpu_and_too_few_are_refused_under_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu_of(rank, 4, 8, "nccl") for rank in range(4)] == [0, 1, 2, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # --gpus-per-task=1
    few = r"8 ranks of this node see 1 GPU \(CUDA_VISIBLE_DEVICES=0\).*gpus_per_node: 8"
    with pytest.raises(EnvironmentNotAble, match=few):
        gpu_of(3, 8, 1, "nccl")
    with pytest.raises(EnvironmentNotAble, match="see 4 GPUs"):
        gpu_of(5, 8, 4, "nccl")
    assert [gpu_of(rank, 4, 2, "gloo") for rank in range(4)] == [0, 1, 0, 1] and gpu_of(0, 1, 1, "nccl") == 0


def test_a_cpu_build_and_a_hidden_gpu_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch 2.13.0+cpu is a build for CPUs" in why_no_gpu("2.13.0+cpu", None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = why_no_gpu("2.13.0", "13.0", None)
    assert "built for CUDA 13.0 (NVIDIA), finds none" in hidden and "(CUDA_VISIBLE_DEVICES=)" in hidden
    assert "ROCm 6.4 (AMD)" in why_no_gpu("2.13.0+rocm6.4", None, "6.4")


def test_ranks_on_mig_have_an_instance_each_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, name in enumerate(("MIG-aa", "MIG-bb")):
        own = {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}
        assert narrow_to_own_mig(rank, own) == 2
        assert (own["CUDA_VISIBLE_DEVICES"], gpu_of(rank, 2, 1, "gloo", 2)) == (name, 0)
    whole = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert narrow_to_own_mig(1, whole) == 0 and whole == {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(EnvironmentNotAble, match="2 MIG instances, and NCCL refuses"):
        gpu_of(1, 2, 1, "nccl", 2)
    monkeypatch.setenv(MULTI_RANK_GPU, "1")
    assert gpu_of(1, 2, 1, "nccl", 2) == 0
    with pytest.raises(EnvironmentNotAble):
        gpu_of(1, 2, 1, "nccl", 1)  # both would use one instance


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
def amd(tmp_path: Path) -> tuple[str, str]:
    """The kernel's list of a node with a CPU and three GPUs, of which one may not be opened."""
    nodes, devices = tmp_path / "nodes", tmp_path / "dri"
    gpu = "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor {}\nunique_id {}"
    gpus = [gpu.format(128 + i, i + 1) for i in range(3)]
    for place, properties in enumerate(["cpu_cores_count 96\nsimd_count 0\ndrm_render_minor 0", *gpus]):
        (nodes / str(place) / "mem_banks" / "0").mkdir(parents=True)
        (nodes / str(place) / "properties").write_text(properties)
        (nodes / str(place) / "mem_banks" / "0" / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    devices.mkdir()
    for minor in (128, 130):
        (devices / f"renderD{minor}").touch()
    return str(nodes), str(devices)


def test_amd_gpus_are_seen_with_their_memory_and_filters(amd: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, devices = map(Path, amd)
    gpus = amd_gpus(nodes, devices)
    assert gpus == [Gpu(index=i, name="AMD gfx942", memory_bytes=206141652992) for i in range(2)]
    expected = [(str(i), gpu.name, str(gpu.memory_bytes >> 20)) for i, gpu in enumerate(gpus)]
    assert [(g["index"], g["name"], g["memory_mb"]) for g in probe.amd(*amd)] == expected
    for name, value, count in (
        ("ROCR_VISIBLE_DEVICES", "1", 1),
        ("HIP_VISIBLE_DEVICES", "1", 0),  # numbers what the other leaves
        ("HIP_VISIBLE_DEVICES", "GPU-0000000000000003", 1),
    ):
        monkeypatch.setenv(name, value)
        assert len(amd_gpus(nodes, devices)) == count


def test_a_build_of_torch_for_another_device_is_refused_before_the_start() -> None:
    nvidia, amd = "NVIDIA H100", "AMD Instinct MI300X"
    for version, gpu, fails in (
        ("2.13.0+cpu", nvidia, True), ("2.13.0+cpu", amd, True), ("2.13.0+rocm6.4", nvidia, True),
        ("2.13.0+cu130", amd, True), ("2.13.0+rocm6.4", amd, False), ("2.13.0", nvidia, False),
    ):  # fmt: skip
        packages = {**node(1).packages, "torch": Package(version=version, origin="/x")}
        one = survey(node(1, gpus=[{"index": "0", "name": gpu, "driver": "1"}], packages=packages))
        found = {device: failures(replace(one, need=PlanRequirements(device=device))) for device in ("cuda", "cpu")}
        assert ("n1.torch" in found["cuda"]) is fails and "n1.torch" not in found["cpu"], (version, gpu)


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

    def decided(spec: dict[str, Any] = raw, *sets: str, gpus: int = 2) -> dict[str, str | None]:
        return {item.name: item.value for item in make_plan(parse_spec(spec, sets), facts(gpus=gpus)).environment}

    assert decided()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and decided()[NUMA_BINDING] == "1"
    older = "cluster.env.PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:64'"
    assert decided(raw, f"cluster.env.{NUMA_BINDING}='0'")[NUMA_BINDING] == "0"
    for other in (decided(raw, older), decided(gpus=0), decided({"script": {"path": "x.py"}})):
        assert "PYTORCH_ALLOC_CONF" not in other


def test_the_thread_that_writes_a_checkpoint_has_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: seen.extend([threading.current_thread().name, str(d)]))
    saver = Saver.__new__(Saver)
    saver.world = dataclasses.replace(SINGLE_PROCESS, device=torch.device("cuda", 3))
    saver._together = SimpleNamespace(meet=lambda what: None)  # type: ignore[assignment]
    monkeypatch.setattr(Saver, "_write", lambda self, *a: seen.append("written"))
    monkeypatch.setattr(Saver, "_complete", lambda self, *a: seen.append("published"))
    args = (SimpleNamespace(step=1), None, 0.0)
    thread = threading.Thread(target=saver._save_in_background, args=args, name="checkpoint")
    thread.start()
    thread.join()
    assert seen == ["checkpoint", "cuda:3", "written", "published"]
