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
    holds = {
        "always": True,
        "gpu": placement.gpu,
        "cpu": not placement.gpu,
        "full": full,
        "small": not full,
        "tiny": tiny,
    }
    holds |= {"nvcc": nvcc, "no nvcc": placement.gpu and not nvcc}
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
    """Return the base with a perceptron on noise of the notes' size, or the largest half, quarter, ... of its width
    that fits."""
    if placement.scale == "tiny":
        chosen, rows_now, steps_now = TINY["width"], TINY["rows"], TINY["steps"]
        why = "requested by --scale tiny"
    else:
        chosen, rows_now, steps_now, why = width, rows, steps, ""
        while (
            placement.scale == "fit"
            and chosen > 64
            and (reason := _too_much(placement, base, chosen, layers, shape, rows, steps))
        ):
            chosen, why = chosen // 2, reason
    spec = _with_mlp(base, chosen, layers, shape, rows_now, steps_now)
    scaled = []
    if (chosen, rows_now) != (width, rows):
        here, there = (mlp_shape(f"mlp:{w}x{layers}", {"shape": shape}).parameters for w in (chosen, width))
        scaled.append(f"width {chosen} instead of {width}: {here:,} parameters instead of {there:,}; {why}")
    if rows_now != rows:
        scaled.append(f"{rows_now} rows per rank instead of {rows}; {why}")
    if steps_now != steps:
        scaled.append(f"{steps_now} steps instead of {steps}; {why}")
    return spec, scaled


def _with_mlp(base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int) -> dict[str, Any]:
    return {
        **base,
        "model": {**base.get("model", {}), "name": f"mlp:{width}x{layers}", "config": {"shape": shape}},
        "data": {"source": "builtin:noise", "eval_fraction": 0.0},
        "train": {
            "max_steps": steps,
            "micro_batch_size": rows,
            "lr": 1e-4,
            "schedule": "constant",
            **base.get("train", {}),
        },
    }


def _too_much(
    placement: Placement, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> str:
    """Return why a size does not fit; empty if it does. Unknown limits of other machines count as sufficient."""
    spec = parse_spec(_with_mlp(base, width, layers, shape, rows, steps))
    if placement.place == "cluster":  # all its nodes run on this machine
        each = placement.machine.memory_bytes * SPARE / placement.world / (1 << 30)
        spec = parse_spec(_with_mlp(_limited(base, each), width, layers, shape, rows, steps))
    estimate = memory.fit(spec, memory.make_plan(spec, placement.machine), placement.machine)
    limit = estimate.capacity.bytes
    room = limit * (SPARE if placement.place == "local" and not placement.gpu else 1.0) if limit else None
    if estimate.verdict == TOO_LARGE or (room is not None and estimate.needed_bytes > room):
        return (
            f"{width} would need {estimate.needed_bytes / 2**30:.1f} GiB per rank, available {(room or 0) / 2**30:.1f} "
            "GiB"
        )
    if placement.gpu or placement.place == "slurm":
        return ""
    parameters = mlp_shape(f"mlp:{width}x{layers}", {"shape": shape}).parameters
    together = placement.world if placement.place == "cluster" else placement.ranks
    cores = min(1.0, placement.machine.cpus / together) * threads(placement)
    seconds = 6 * parameters * rows * steps / (CPU_FLOPS * cores)
    return f"{steps} steps of {width} would take about {seconds:.0f} s on these cores" if seconds > CPU_BUDGET_S else ""


def _limited(base: dict[str, Any], gib: float) -> dict[str, Any]:
    return {**base, "cluster": {**base["cluster"], "device_memory_gib": gib}}
