"""What fits a machine. A test asks for the notes' size and gets the nearest that has room and, on CPU cores, comes to an end. Pure."""

from __future__ import annotations

from typing import Any

from allranks import fit as memory
from allranks.fit.records import TOO_LARGE
from allranks.mlp import mlp_shape
from allranks.planning import make_plan
from allranks.smoke.records import Asked
from allranks.spec import parse_spec

CPU_FLOPS = (
    15e9  # a core's, roughly, in these layers' float32 products; only to choose a size, nothing is reported from it
)
CPU_BUDGET_S = 120.0
TINY = {"width": 16, "rows": 4, "steps": 4}
SPARE = 0.6  # of the memory: other programs are there too


def base_spec(asked: Asked, name: str) -> dict[str, Any]:
    """What all tests share: full checkpoints, proofs at the end, no evaluation unless a test wants one."""
    cluster: dict[str, Any] = {
        "launcher": "local" if asked.place == "local" else "slurm",
        "nodes": asked.nodes,
        "procs_per_node": asked.ranks,
        "timeout_s": 600,
    }
    if asked.gpu and asked.place != "local":
        cluster["slurm"] = {"gpus_per_node": asked.ranks}
    if not asked.gpu:
        cluster |= {"device": "cpu", "env": {"OMP_NUM_THREADS": str(threads(asked))}}
    return {
        "name": f"smoke-{name}",
        "cluster": cluster,
        "checkpoint": {"mode": "full"},
        "observe": {"proof_at_end": True, "telemetry_s": 1.0},
    }


def threads(asked: Asked) -> int:
    """A rank's share of the cores it can have here."""
    together = asked.world if asked.place == "cluster" else asked.ranks
    return max(1, asked.machine.cpus // together)


def mlp_spec(
    asked: Asked, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """The base with a perceptron on noise of the notes' size, or the largest half, quarter, ... of its width that fits."""
    if asked.scale == "tiny":
        chosen, rows_now, steps_now = TINY["width"], TINY["rows"], TINY["steps"]
        why = "asked for with --scale tiny"
    else:
        chosen, rows_now, steps_now, why = width, rows, steps, ""
        while (
            asked.scale == "fit"
            and chosen > 64
            and (reason := _too_much(asked, base, chosen, layers, shape, rows, steps))
        ):
            chosen, why = chosen // 2, reason
    spec = _with_mlp(base, chosen, layers, shape, rows_now, steps_now)
    scaled = []
    if (chosen, rows_now) != (width, rows):
        here, there = (mlp_shape(f"mlp:{w}x{layers}", {"shape": shape}).parameters for w in (chosen, width))
        scaled.append(f"width {chosen} instead of {width}: {here:,} parameters instead of {there:,}; {why}")
    if rows_now != rows:
        scaled.append(f"{rows_now} rows a rank instead of {rows}; {why}")
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


def _too_much(asked: Asked, base: dict[str, Any], width: int, layers: int, shape: str, rows: int, steps: int) -> str:
    """Why a size does not fit; empty if it does. What is not known of other machines is taken for enough."""
    spec = parse_spec(_with_mlp(base, width, layers, shape, rows, steps))
    if asked.place == "cluster":  # all its nodes are this machine
        each = asked.machine.memory_bytes * SPARE / asked.world / (1 << 30)
        spec = parse_spec(_with_mlp(_limited(base, each), width, layers, shape, rows, steps))
    found = memory.fit(spec, make_plan(spec, asked.machine), asked.machine)
    limit = found.capacity.bytes
    room = limit * (SPARE if asked.place == "local" and not asked.gpu else 1.0) if limit else None
    if found.verdict == TOO_LARGE or (room is not None and found.needed_bytes > room):
        return f"{width} would need {found.needed_bytes / 2**30:.1f} GiB a rank of {(room or 0) / 2**30:.1f} GiB"
    if asked.gpu or asked.place == "slurm":
        return ""
    parameters = mlp_shape(f"mlp:{width}x{layers}", {"shape": shape}).parameters
    together = asked.world if asked.place == "cluster" else asked.ranks
    cores = min(1.0, asked.machine.cpus / together) * threads(asked)
    seconds = 6 * parameters * rows * steps / (CPU_FLOPS * cores)
    return f"{steps} steps of {width} would take these cores about {seconds:.0f} s" if seconds > CPU_BUDGET_S else ""


def _limited(base: dict[str, Any], gib: float) -> dict[str, Any]:
    return {**base, "cluster": {**base["cluster"], "device_memory_gib": gib}}
