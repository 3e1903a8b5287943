"""`allranks plan` says how much memory a rank will take; this trains the same and looks.

Every case of ``benchmarks/fit_cases.json`` is estimated (from the spec alone), then measured, each in fresh processes.
What is compared, and how it is measured, stands in that file, which was written before the first measurement.

Run as: ``python -m benchmarks.fit [--cases 1,5,11] [--again] [--file CASES] [--result RESULT]``
Exit code 0: every error is within 10 %; 1 otherwise. The result is `benchmarks/results/fit.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from rich.console import Console
from rich.table import Table

from allranks.planning.memory import fit, make_plan
from allranks.planning.rank_environment import as_variables
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from allranks.utils.text import format_bytes
from benchmarks import machine
from benchmarks.programs import ROOT

CASES = Path(__file__).with_name("fit_cases.json")
RESULT = ROOT / "benchmarks" / "results" / "fit.json"
LIMIT = 0.10
TIMEOUT_S = 900


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Cases with their defaults, and the spec that each of them is."""
    found = json.loads(path.read_text())
    return [
        {**found["defaults"], **case, "spec": spec_of({**found["defaults"], **case}, found)} for case in found["cases"]
    ]


def spec_of(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The spec as a user would write it."""
    model = dict(found["models"][case["model"]])
    if family := model.pop("family", None):
        model = {"name": str(saved_model(family, model["config"]))}
    return {
        "name": f"case{case['id']}",
        "model": {**model, "dtype": case["dtype"], "gradient_checkpointing": case["gradient_checkpointing"]},
        "data": {"source": "builtin:instructions", "max_length": case["max_length"], "packing": case["packing"]},
        "adapter": {"type": "lora", "r": 8, "dropout": 0.0 if case["model"].startswith(("moe", "experts")) else 0.05}
        if case["adapter"] == "lora"
        else {"type": "none"},
        "strategy": {"name": case["strategy"]},
        "train": {
            "micro_batch_size": case["micro_batch_size"],
            "grad_accum": case["grad_accum"],
            "max_steps": case["steps"],
            "param_dtype": case.get("param_dtype", case["dtype"]),
        },
        "cluster": {"procs_per_node": case["ranks"], "device": "cpu"},
    }


def saved_model(family: str, config: dict[str, Any]) -> Path:
    """A folder with a model of random weights, made once for each config: only some families have a ``tiny:`` form."""
    name = hashlib.sha256(json.dumps([family, config], sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(gettempdir()) / "allranks-fit" / name
    if not (folder / "config.json").exists():
        code = (
            "import json, sys, torch; from transformers import AutoConfig, AutoModelForCausalLM as M; "
            "torch.manual_seed(1);M.from_config(AutoConfig.for_model(sys.argv[1], **json.loads(sys.argv[2])))"
            ".save_pretrained(sys.argv[3])"
        )
        subprocess.run([sys.executable, "-c", code, family, json.dumps(config), str(folder)], check=True)
    return folder


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 measured, or {"failed": why}."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fit_rank", str(folder / "case.json"), str(folder / "result.json")],
                cwd=ROOT,
                env=_environment(case, rank, port),
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"err{rank}").open("wb"),
            )
            for rank in range(case["ranks"])
        ]
        end = time.monotonic() + TIMEOUT_S
        try:
            for process in ranks:
                process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"failed": f"no end within {TIMEOUT_S} s"}
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        if not (folder / "result.json").exists():
            return {"failed": "".join((folder / f"err{r}").read_text()[-1500:] for r in range(case["ranks"]))}
        return json.loads((folder / "result.json").read_text())


def _environment(case: dict[str, Any], rank: int, port: int) -> dict[str, str]:
    ranks = case["ranks"]
    planned = as_variables(make_plan(parse_spec(case["spec"]), machine_facts()).environment)
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": 1,
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    return os.environ | planned | {k: str(v) for k, v in own.items()}


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """The estimate: of the whole process, or of its tensors in the training steps alone."""
    spec, facts = parse_spec(case["spec"]), machine_facts()
    found = fit(spec, make_plan(spec, facts), facts)
    if not found.moments:
        return {"unknown": found.unknown}
    beside = {"process": ("imports",), "storages": ("imports", "runtime", "slack")}[case["measure"]]
    own = [{k: n for k, n in m.parts.items() if k not in beside} for m in found.moments]
    first = 0 if case["measure"] == "process" else 1  # set-up is no training step
    at = max(range(first, len(own)), key=lambda i: sum(own[i].values()))
    name = found.moments[at].name
    return {"bytes": sum(own[at].values()), "moment": name, "parts": own[at], "parameters": found.parameters}


def compared(case: dict[str, Any], expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One row of the result."""
    row = {k: v for k, v in case.items() if k != "spec"} | {"estimated": expected}
    if "failed" in found:
        return row | {"failed": found["failed"]}
    ranks = found["ranks"]
    first = ranks[0]
    return (
        row
        | {
            "measured_bytes": first["bytes"],
            "measured_bytes_of_all_ranks": [r["bytes"] for r in ranks],
            "parameters": first["parameters"],
            "parameters_trained": first["parameters_trained"],
        }
        | ({"error": round(expected["bytes"] / first["bytes"] - 1, 4)} if "bytes" in expected else {})
    )


def _measured(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of an earlier result was made of."""
    more = {k: row[k] for k in ("parameters", "parameters_trained")}
    return {"ranks": [{"bytes": n, **more} for n in row["measured_bytes_of_all_ranks"]]}


def table(rows: list[dict[str, Any]]) -> Table:
    """Estimate against measurement."""
    shown = Table(title="Memory of rank 0: estimated and measured", title_justify="left")
    for name in (
        "case",
        "model",
        "strategy",
        "trains",
        "checkpointing",
        "measure",
        "estimated",
        "at",
        "measured",
        "error",
    ):
        shown.add_column(name)
    for r in rows:
        shown.add_row(
            str(r["id"]),
            f"{r['model']} {r['dtype']}",
            f"{r['strategy']} x{r['ranks']}",
            "all" if r["adapter"] == "none" else "LoRA",
            "yes" if r["gradient_checkpointing"] else "no",
            r["measure"],
            format_bytes(r["estimated"]["bytes"]) if "bytes" in r["estimated"] else "unknown",
            r["estimated"].get("moment", ""),
            "failed" if "failed" in r else format_bytes(r["measured_bytes"]),
            f"{r['error']:+.1%}" if "error" in r else "",
        )
    return shown


def main() -> int:
    """Estimate, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", help="numbers, with commas; the other cases keep their earlier result")
    parser.add_argument("--file", type=Path, default=CASES)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument(
        "--again", action="store_true", help="measure nothing: estimate anew, against the earlier measurements"
    )
    args = parser.parse_args()
    wanted = set(map(int, args.cases.split(","))) if args.cases else None
    earlier = json.loads(args.result.read_text())["rows"] if (wanted or args.again) and args.result.exists() else []
    rows = {row["id"]: row for row in earlier}
    for case in read_cases(args.file):
        if wanted and case["id"] not in wanted:
            continue
        row = compared(case, predict(case), _measured(rows[case["id"]]) if args.again else measure(case))
        if (before := rows.get(case["id"])) and "error" in before:
            row["first_error"] = before.get(
                "first_error", before["error"]
            )  # what was estimated before the first measurement
        rows[case["id"]] = row
        print(f"case {case['id']}: {row.get('error', row.get('failed', 'no estimate'))}", flush=True)
        _write(args.result, rows)
    Console(width=150).print(table([rows[i] for i in sorted(rows)]))
    unknown = [r["model"] for r in rows.values() if "unknown" in r["estimated"]]
    good = [r for r in rows.values() if abs(r.get("error", math.inf)) <= LIMIT]
    known = len(rows) - len(unknown)
    print(f"{len(good)} of {known} within {LIMIT:.0%}" + (f"; no estimate: {', '.join(unknown)}" if unknown else ""))
    return 0 if len(good) == known else 1


def _write(path: Path, rows: dict[int, dict[str, Any]]) -> None:
    ordered = [rows[i] for i in sorted(rows)]
    path.write_text(json.dumps({"machine": machine.facts(), "limit": LIMIT, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
