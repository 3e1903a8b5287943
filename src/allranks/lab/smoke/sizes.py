"""Build the spec of a smoke test for a machine: the size of the field notes, or the nearest that fits. Pure, except
`has_nvcc`.

A test requests the size of the notes and gets the nearest size that fits into memory and, on CPU cores, ends in time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.lab.smoke.records import Placement, SmokeTest
from allranks.planning import memory
from allranks.planning.memory.estimate import TOO_LARGE
from allranks.spec import parse_spec
from allranks.spec.models import mlp_shape

CPU_FLOPS = 15e9  # rough FLOP/s of a core for float32 matrix products; only used to choose a size
CPU_BUDGET_S = 120.0
TINY = {"width": 16, "rows": 4, "steps": 4}
SPARE = 0.6  # of the memory; other programs need some


def build_spec(test: SmokeTest, placement: Placement) -> tuple[dict[str, Any], list[str]]:
    """Return the test's spec for a place as plain values, and one sentence for each difference from the notes."""
    spec = _merged(base_spec(placement, test.run), test.spec)
    scaled: list[str] = []
    if test.mlp is not None:
        spec, scaled = mlp_spec(placement, spec, **test.mlp)
    tiny, full = placement.scale == "tiny", placement.gpu and placement.scale != "tiny"
    nvcc = placement.gpu and has_nvcc()
    holds = {"always": True, "gpu": placement.gpu, "cpu": not placement.gpu, "full": full, "small": not full}
    holds |= {"tiny": tiny, "nvcc": nvcc, "no nvcc": placement.gpu and not nvcc}
    why = "requested by --scale tiny" if tiny else "no GPU"
    for variant in test.variants:
        if holds[variant["when"]]:
            spec = _merged(spec, variant.get("spec", {}))
            scaled += [variant["scaled"].replace("{why}", why)] if "scaled" in variant else []
    return spec, scaled


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return base with the values of change; mappings in both are merged."""
    both = {k: _merged(base[k], v) for k, v in change.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **change, **both}


def has_nvcc() -> bool:
    """Return whether CUDA's compiler is found where DeepSpeed looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()


def base_spec(placement: Placement, name: str) -> dict[str, Any]:
    """Return the common part of all tests: full checkpoints, final checks, and by default no evaluation."""
    cluster: dict[str, Any] = {
        "launcher": "local" if placement.place == "local" else "slurm",
        "nodes": placement.nodes,
        "procs_per_node": placement.ranks,
        "timeout_s": 600,
        "restarts": {"max": 0},  # a test that passes only when it is repeated has failed
    }
    if placement.gpu and placement.place != "local":
        cluster["slurm"] = {"gpus_per_node": placement.ranks}
    if not placement.gpu:
        cluster |= {"device": "cpu", "env": {"OMP_NUM_THREADS": str(threads(placement))}}
    return {
        "name": f"smoke-{name}",
        "cluster": cluster,
        "checkpoint": {"mode": "full"},
        "observe": {"proof_at_end": True, "telemetry_s": 1.0},
    }


def threads(placement: Placement) -> int:
    """Return a rank's share of the available cores."""
    together = placement.world if placement.place == "cluster" else placement.ranks
    return max(1, placement.machine.cpus // together)


def mlp_spec(
    placement: Placement, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the base with a perceptron on noise, of the notes' size or with its width halved until it fits."""

    def parameters(size: int) -> int:
        return mlp_shape(f"mlp:{size}x{layers}", {"shape": shape}).parameters

    chosen, why = width, ""
    full_rows, full_steps = rows, steps
    if placement.scale == "tiny":
        chosen, rows, steps = TINY["width"], TINY["rows"], TINY["steps"]
        why = "requested by --scale tiny"
    spec = _with_mlp(base, chosen, layers, shape, rows, steps)
    while placement.scale == "fit" and chosen > 64 and (reason := _too_much(placement, spec, parameters(chosen))):
        chosen, why = chosen // 2, reason.format(width=chosen)
        spec = _with_mlp(base, chosen, layers, shape, rows, steps)
    scaled = []
    if (chosen, rows) != (width, full_rows):
        sizes = f"{parameters(chosen):,} parameters instead of {parameters(width):,}"
        scaled.append(f"width {chosen} instead of {width}: {sizes}")
    if rows != full_rows:
        scaled.append(f"{rows} rows per rank instead of {full_rows}")
    if steps != full_steps:
        scaled.append(f"{steps} steps instead of {full_steps}")
    if scaled:
        scaled[-1] += f"; {why}"
    return spec, scaled


def _with_mlp(base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int) -> dict[str, Any]:
    train = {"max_steps": steps, "micro_batch_size": rows, "lr": 1e-4, "schedule": "constant"}
    return {
        **base,
        "model": {**base.get("model", {}), "name": f"mlp:{width}x{layers}", "config": {"shape": shape}},
        "data": {"source": "builtin:noise", "eval_fraction": 0.0},
        "train": {**train, **base.get("train", {})},
    }


def _too_much(placement: Placement, values: dict[str, Any], parameters: int) -> str:
    """Return why a size does not fit; empty if it does. Unknown limits of other machines count as sufficient."""
    if placement.place == "cluster":  # all its nodes run on this machine
        share = placement.machine.memory_bytes * SPARE / placement.world / (1 << 30)
        values = _merged(values, {"cluster": {"device_memory_gib": share}})
    spec = parse_spec(values)
    estimate = memory.fit(spec, memory.make_plan(spec, placement.machine), placement.machine)
    limit = estimate.capacity.bytes
    room = limit * (SPARE if placement.place == "local" and not placement.gpu else 1.0) if limit else None
    if estimate.verdict == TOO_LARGE or (room is not None and estimate.needed_bytes > room):
        needed, available = estimate.needed_bytes / 2**30, (room or 0) / 2**30
        return f"{{width}} would need {needed:.1f} GiB per rank, available {available:.1f} GiB"
    if placement.gpu or placement.place == "slurm":
        return ""
    together = placement.world if placement.place == "cluster" else placement.ranks
    cores = min(1.0, placement.machine.cpus / together) * threads(placement)
    train = values["train"]
    seconds = 6 * parameters * train["micro_batch_size"] * train["max_steps"] / (CPU_FLOPS * cores)
    text = f"{train['max_steps']} steps of {{width}} would take about {seconds:.0f} s on these cores"
    return text if seconds > CPU_BUDGET_S else ""
