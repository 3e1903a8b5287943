"""Write docs/proved.md: what was proved where. ``python scripts/make_proved_page.py``; a test checks that the page is up to date.

Features and their test files are those of the table in tests/README.md. CPU and cluster in a box: benchmarks/results/test_all.json, which
`make test-all` writes. GPUs: benchmarks/results/gpu/*.json, which `make gpu` writes; rehearsals do not count. A cell without a result says
"not run".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = "not run"
SEVERAL = "several"  # the check that needs more than one GPU

# Checks of `make gpu` that prove a feature on one GPU: names, or beginnings of names followed by a dot.
ON_A_GPU: dict[str, tuple[str, ...]] = {
    "Strategies give the same result": ("one_rank", "two_ranks", "demo"),
    "Checkpoints": ("resume", "stopped"),
    "A complete run": ("demo", "full"),
    "Resume after a stop": ("resume", "stopped"),
    "Ends of a run": ("nan", "stopped"),
    "Loading of models": ("full", "plain"),
    "DeepSpeed": ("one_rank.one_rank_equals_plain_torch[deepspeed", "demo.deepspeed"),
    "Engine `hf_trainer`": ("one_rank.one_rank_equals_plain_torch[hf_trainer", "demo.hf_trainer"),
    "Perceptrons": ("smoke",),
    "Comparison": ("sharing",),
    "Smoke tests": ("smoke",),
    "Recomputation, compiled blocks": ("compiled", "recomputed", "selective"),
    "Memory estimate": ("memory", "bench_memory"),
    "Hangs and stragglers": ("spin",),
    "Profile and traces": ("profiled", "profiled_compiled"),
    "Preflight on nodes": ("doctor",),
}
# What only a GPU can show, and no test of the table.
GPU_ONLY: dict[str, tuple[str, ...]] = {
    "No host synchronisation within a step": ("host_sync",),
    "Batches that are copied ahead": ("batches",),
    "Speed and MFU of LoRA, 8 layers of 7B": ("plain", "isolated", "recomputed"),
    "torch.compile": ("compiled", "compiled_isolated", "flex"),
    "A 7B model": ("full", "full_compiled"),
    "Unit tests with CUDA": ("unit",),
}
ON_SEVERAL = ("Strategies give the same result", "Comparison")

HEAD = """# What was proved where

One process of plain torch, two to four Gloo ranks on CPUs, Slurm on one machine (the [cluster in a box](cluster-in-a-box.md)), one GPU,
several GPUs: a feature that works in one place may fail in another, so each cell below is a recorded result. `not run` means that there is no
record, not that it fails. `make test-all` records the first two columns, `make gpu` the others ([how](../benchmarks/README.md#gpu-one-gpu)).
Written by `scripts/make_proved_page.py` from `benchmarks/results/`.

"""


def features() -> dict[str, list[str]]:
    """Return the features of tests/README.md with their test files."""
    found = {}
    for line in (ROOT / "tests" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        files = re.findall(
            r"`((?:dist|cluster|unit|reference|chaos|security)/test_\w+\.py)`", cells[1] if len(cells) > 2 else ""
        )
        if files:
            found[cells[0]] = files
    if unknown := (ON_A_GPU.keys() | set(ON_SEVERAL)) - found.keys():
        raise SystemExit(f"make_proved_page: tests/README.md has no feature {', '.join(sorted(unknown))}")
    return found


def parts_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of test_all.json, each with its own date; an older file is one part."""
    return list(record.get("parts", {}).values()) or [record]


def tested(record: Mapping[str, Any], files: list[str]) -> str:
    """Return the cell of some test files."""
    ran, bad, dates = [], [], []
    for part in parts_of(record):
        here = [f for f in files if f"tests/{f}" in part.get("files_s", {})]
        names = tuple("tests." + f.removesuffix(".py").replace("/", ".") + "::" for f in here)
        bad += (
            [
                n
                for n, status in part.get("not_passed", {}).items()
                if status in ("failure", "error") and n.startswith(names)
            ]
            if names
            else []
        )
        dates += [part["when"]] if here else []
        ran += here
    if not ran:
        return NOT_RUN
    return f"{f'{len(bad)} failed' if bad else 'passed'} {max(dates)}"


def matches(check: str, wanted: tuple[str, ...]) -> bool:
    """Return whether a check's name is one of these, or a case of one."""
    return any(check == w or check.startswith(f"{w}.") or ("." in w and check.startswith(w)) for w in wanted)


def on_gpus(records: list[dict[str, Any]], wanted: tuple[str, ...], *, several: bool) -> str:
    """Return the cell of some checks: by device, the newest record that has them."""
    cells: dict[str, str] = {}
    for record in records:  # oldest first
        if several and record["device"]["count"] < 2:
            continue
        found = [
            c for stage in record["stages"].values() for name, c in stage["checks"].items() if matches(name, wanted)
        ]
        counts = {s: sum(c["status"] == s for c in found) for s in ("passed", "failed", "skipped")}
        if counts["passed"] + counts["failed"] == 0:
            continue
        text = f"{counts['failed']} of {counts['passed'] + counts['failed']} failed" if counts["failed"] else "passed"
        cells[record["device"]["name"]] = f"{text} {record['machine']['date'][:10]} ({record['device']['name']})"
    return "; ".join(cells.values()) or NOT_RUN


def table(tests: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
    """Return the table of all features."""
    lines = ["| feature | CPU | cluster in a box | one GPU | several GPUs |", "|---|---|---|---|---|"]
    for name, files in features().items():
        box = [f for f in files if f.startswith("cluster/")]
        cpu = tested(tests, [f for f in files if f not in box])
        one = on_gpus(records, ON_A_GPU.get(name, ()), several=False)
        many = on_gpus(records, (SEVERAL,), several=True) if name in ON_SEVERAL else NOT_RUN
        lines.append(f"| {name} | {cpu} | {tested(tests, box)} | {one} | {many} |")
    for name, checks in GPU_ONLY.items():
        lines.append(f"| {name} | - | - | {on_gpus(records, checks, several=False)} | {NOT_RUN} |")
    return "\n".join(lines) + "\n"


def figure(value: Any) -> str:
    """Return a figure of a check as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {figure(v)}" for k, v in value.items()) + "}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else str(value)


def together(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the records of one device, oldest first, as one: of each check, with all its cases, the newest result."""
    stages: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, found in record["stages"].items():
            into = stages.setdefault(name, {"finished": False, "seconds": 0.0, "checks": {}})
            again = {check.partition(".")[0] for check in found["checks"]}
            kept = {check: c for check, c in into["checks"].items() if check.partition(".")[0] not in again}
            into["checks"] = kept | found["checks"]
            into["seconds"] += found["seconds"]
            into["finished"] = into["finished"] or found["finished"]
    return {**records[-1], "stages": stages}


def device_page(record: Mapping[str, Any]) -> str:
    """Return the results of one record as Markdown."""
    device, versions = record["device"], record["versions"]
    commit, plus, changes = record["commit"].partition("+")
    head = f"{device['name']}, {record['machine']['date'][:10]}, commit {commit[:12]}{plus}{changes}"
    facts = ", ".join(f"{k} {v}" for k, v in {"driver": device.get("driver"), **versions}.items() if v)
    lines = [
        f"## {head}",
        "",
        *(["**Rehearsal on a CPU with tiny sizes; not a result of a GPU.**", ""] if record["rehearsal"] else []),
        f"{facts}; C compiler: {record['compiler'] or 'none'}.",
        "",
        *([record["note"], ""] if record.get("note") else []),
    ]
    for stage, found in record["stages"].items():
        checks = found["checks"].values()
        counts = ", ".join(
            f"{n} {s}" for s in ("passed", "failed", "skipped") if (n := sum(c["status"] == s for c in checks))
        )
        lines += [
            f"### {stage}: {counts or 'no result'} in {found['seconds']:.0f} s{'' if found['finished'] else ', not finished'}",
            "",
        ]
        lines += ["| check | result | s | limit | figures or reason |", "|---|---|---|---|---|"]
        for name, c in found["checks"].items():
            said = c["reason"] or ", ".join(f"{k} {figure(v)}" for k, v in c["figures"].items())
            text = " ".join(said.split())[:400].replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{name}` | {c['status']} | {c['seconds']:.1f} | {c['limit_s']:.0f} | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def text() -> str:
    """Return the page."""
    results = ROOT / "benchmarks" / "results"
    tests = json.loads((results / "test_all.json").read_text())
    every = [json.loads(p.read_text()) for p in sorted((results / "gpu").glob("*.json"))]
    records = sorted((r for r in every if not r["rehearsal"]), key=lambda r: r["machine"]["date"])
    devices: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        devices.setdefault(record["device"]["name"], []).append(record)
    pages = [device_page(together(of_one)) for of_one in devices.values()] or ["No record of a GPU yet.\n"]
    return HEAD + table(tests, records) + "\n" + "\n".join(pages)


def write() -> None:
    """Replace the page."""
    (ROOT / "docs" / "proved.md").write_text(text())


if __name__ == "__main__":
    write()
