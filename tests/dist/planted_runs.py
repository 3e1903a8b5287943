"""Plant a defect in a copy of the package, compare strategies with it, and tell what refused it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import allranks

PLANTED = Path(__file__).parent / "planted"
SPEC: dict[str, Any] = {
    "name": "defect",
    "model": {"name": "tiny:llama", "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}},
    "data": {"source": "builtin:instructions", "subset": 160, "max_length": 96},
    "strategy": {"name": "pytorch_ddp", "bucket_mb": 0.05},
    "train": {"max_steps": 10, "micro_batch_size": 2, "grad_accum": 2, "lr": 1e-3},
    "cluster": {"procs_per_node": 2},
}
NEEDS: dict[str, dict[str, Any]] = {"b06": {"train.weight_decay": 0.1}, "b10": {"adapter.type": "lora"}}
"""What the blind defects need of a spec to do something."""


def edits(file: str) -> list[dict[str, Any]]:
    return yaml.safe_load((PLANTED / file).read_text())


def strategies_of(edit: dict[str, Any]) -> str:
    """The strategies to compare: those that the entry names, that of its file, or a plain one."""
    known = edit["file"].startswith("train/strategies/") and Path(edit["file"]).stem
    own = {
        "fsdp2": "pytorch_zero2,pytorch_zero3", "zero": "zero1,zero2,zero3", "sharded_optimizer": "zero1,zero2,zero3",
        "gradient_sync": "bucket_ddp_async,zero1", "base": "simple_ddp_ga,zero3",
    }  # fmt: skip
    return edit.get("strategies") or own.get(str(known), "simple_ddp_ga")


def plant(edit: dict[str, Any], folder: Path) -> Path:
    """Copy the package, make the edit, and return the folder for PYTHONPATH."""
    source = Path(allranks.__file__).parent
    copy = folder / "source" / "allranks"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / name_of(edit)).write_text(edited(edit))
    return copy.parent


def name_of(edit: dict[str, Any]) -> str:
    return edit["file"].removeprefix("src/allranks/")


def edited(edit: dict[str, Any]) -> str:
    """The file with the defect. The old text must be there exactly once."""
    text = (Path(allranks.__file__).parent / name_of(edit)).read_text()
    assert text.count(edit["old"]) == 1, (
        f"{edit['id']}: the old text occurs {text.count(edit['old'])} times in {edit['file']}"
    )
    return text.replace(edit["old"], edit["new"])


def run(edit: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compare with the defect; return ``by`` (the gates that refused, or ``run``, or nothing) and ``reasons``, over all
    strategies."""
    source = plant(edit, folder)
    spec = json.loads(json.dumps(SPEC))
    for key, value in {**NEEDS.get(edit["id"], {}), **edit.get("spec", {})}.items():
        part, _, name = key.partition(".")
        spec.setdefault(part, {})[name] = value
    spec["cluster"]["cache"] = str(folder / "cache")
    (folder / "defect.yaml").write_text(yaml.safe_dump(spec))
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allranks.cli.main", "compare", "defect.yaml", "--repeats", "1", "--json"]
    done = subprocess.run(
        [*command, "--strategies", strategies_of(edit)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if not done.stdout.strip():
        return {"by": ["run"], "reasons": [done.stderr.strip().splitlines()[-1]], "rows": {}}
    rows = json.loads(done.stdout)["rows"]
    gates = [gate for gate in ("parity", "mechanism", "equal_work") if not all(row["gates"][gate] for row in rows)]
    return {
        "by": gates,
        "reasons": list(dict.fromkeys(reason for row in rows for reason in row["reasons"])),
        "rows": {row["strategy"]: all(row["gates"].values()) for row in rows},
    }
