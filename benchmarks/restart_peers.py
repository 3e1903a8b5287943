"""One rank of two is killed: how long until the first new step, how many steps are lost, and what the user is told.

    python -m benchmarks.restart_peers [--repeat 3] [--nvrx PATH/TO/ft_launcher]

allranks (its own training, and the plain program), torchrun, HF Trainer in a retry loop, and the launcher of NVRx run
in turn, each with the same tiny model, checkpoints every 10 steps, and SIGKILL to rank 1 once it has done step 25.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import CpuClock, facts
from benchmarks.programs import ROOT, console_script, end_group, exit_on_sigterm, usual_environment
from benchmarks.restart_programs import LENGTH, SHAPE

STEPS, SAVE_EVERY, KILL_AFTER = 45, 10, 25
LIMIT_S = 240.0
TABLE = ROOT / "benchmarks" / "results" / "restart_peers.json"
PROGRAM = str(ROOT / "benchmarks" / "restart_programs.py")
TOLD = r"^(failed +attempt|restart +\S)|exitcode: -9|Signal 9|SIGKILL|ChildFailedError"
NOT_TOLD = re.compile(r"max_restarts|FutureWarning|--max-restarts")


def commands(folder: Path, nvrx: str | None) -> dict[str, list[str]]:
    """Return the command of each system, which runs in `folder`."""
    words = [str(folder), str(STEPS), str(SAVE_EVERY)]
    plain, trainer = [PROGRAM, "plain", *words], [PROGRAM, "hf", *words]
    torchrun = [console_script("torchrun"), "--standalone", "--nproc-per-node=2"]
    retry = " ".join([*torchrun, "--max-restarts=0", *trainer])
    systems = {
        "allranks": [console_script(), "run", "spec.yaml"],
        "allranks, plain program": [console_script(), "run", "program.yaml"],
        "torchrun --max-restarts=3, plain program": [*torchrun, "--max-restarts=3", *plain],
        "HF Trainer, resume_from_checkpoint in a retry loop": ["sh", "-c", f"for i in 1 2 3; do {retry} && exit; done"],
    }
    if nvrx:
        heartbeats = ["--ft-initial-rank-heartbeat-timeout=120", "--ft-rank-heartbeat-timeout=60"]
        options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", *heartbeats]
        systems["NVRx ft_launcher --max-restarts=3, plain program"] = [nvrx, *options, *plain]
    return systems


def write_specs(folder: Path) -> None:
    """Write the specs of allranks: the same model, and the plain program."""
    rows = [{"instruction": f"say {i}", "input": "", "output": "word " * 20} for i in range(200)]
    (folder / "rows.json").write_text(json.dumps(rows))
    cluster = {"launcher": "local", "procs_per_node": 2, "device": "cpu", "cache": str(folder / "cache")}
    training = {
        "name": "peer", "model": {"name": "tiny:mistral", "config": SHAPE}, "cluster": cluster,
        "data": {"source": str(folder / "rows.json"), "max_length": LENGTH}, "eval": {"samples": 0},
        "train": {"max_steps": STEPS, "micro_batch_size": 2, "lr": 1e-3},
        "checkpoint": {"mode": "full", "every": SAVE_EVERY}, "run_root": str(folder / "runs"),
    }  # fmt: skip
    arguments = ["plain", str(folder), str(STEPS), str(SAVE_EVERY)]
    script = {"path": PROGRAM, "args": arguments}
    program = {"name": "peer", "script": script, "run_root": str(folder / "runs")}
    program["cluster"] = {**cluster, "restarts": {"max": 3}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(training))
    (folder / "program.yaml").write_text(yaml.safe_dump(program))


def steps_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the steps that a rank has recorded: step, time, pid."""
    events = [*folder.glob(f"rank{rank}.jsonl"), *folder.glob(f"runs/*/events/rank{rank}.jsonl")]
    found, pid = [], 0
    for line in (line for path in events for line in path.read_text().splitlines() if line.endswith("}")):
        one = json.loads(line)
        pid = one.get("pid", pid)
        if "step" in one and one.get("event", "step") == "step":
            found.append({"step": one["step"], "time": one["time"], "pid": pid})
    return sorted(found, key=lambda one: one["time"])


def measure(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a system in an empty folder, kill its rank 1, and return the figures."""
    write_specs(folder)
    log, clock, deadline = folder / "output.txt", CpuClock.now(), time.monotonic() + LIMIT_S
    with log.open("wb") as output:
        env = {**usual_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    before, told_from, killed_at = 0, 0, 0.0
    try:
        while not (ready := [s for s in steps_of(folder, 1) if s["step"] >= KILL_AFTER]):
            if process.poll() is not None or time.monotonic() > deadline:
                return {"error": log.read_text(errors="replace")[-500:]}
            time.sleep(0.02)
        before, told_from, killed_at = steps_of(folder, 0)[-1]["step"], log.stat().st_size, time.time()
        os.kill(ready[-1]["pid"], signal.SIGKILL)
        code = process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_group(process)
    pid = next((s["pid"] for s in steps_of(folder, 0)), 0)
    new = [s for s in steps_of(folder, 0) if s["pid"] != pid]
    lines = log.read_bytes()[told_from:].decode(errors="replace").splitlines()
    told = [line.strip()[:200] for line in lines if re.search(TOLD, line) and not NOT_TOLD.search(line)]
    return {
        "fault_to_first_new_step_s": round(new[0]["time"] - killed_at, 2) if new else None,
        "steps_lost": before - (new[0]["step"] - 1) if new else None,
        "finished": code == 0 and bool(new) and new[-1]["step"] == STEPS,
        "told": [line.replace(str(folder), "FOLDER").replace(str(ROOT), "REPO") for line in told[:3]],
        **clock.disturbance(),
    }


def main() -> None:
    """Measure all systems in turn and write the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.restart_peers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--nvrx", help="ft_launcher of an environment with nvidia-resiliency-ext")
    parser.add_argument("--nvrx-version", default="not installed")
    parser.add_argument("--only", default="", help="a regular expression for the names of systems")
    args = parser.parse_args()
    exit_on_sigterm()
    seen: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(args.repeat):
        for name in (name for name in commands(Path(), args.nvrx) if re.search(args.only, name)):
            with tempfile.TemporaryDirectory(prefix="restart-peers-", ignore_cleanup_errors=True) as made:
                one = measure(commands(Path(made), args.nvrx)[name], Path(made))
            seen.setdefault(name, []).append(one)
            print(repetition, name, json.dumps(one), file=sys.stderr, flush=True)
            _write(seen, args.nvrx_version)


def _write(seen: dict[str, list[dict[str, Any]]], nvrx: str) -> None:
    table: dict[str, Any] = {"machine": facts(), "nvidia-resiliency-ext": nvrx, "fault": "SIGKILL of rank 1 of 2"}
    table |= {"steps": STEPS, "checkpoint_every": SAVE_EVERY, "killed_after_step": KILL_AFTER, "systems": {}}
    for name, each in seen.items():
        row: dict[str, Any] = {"repetitions": len(each), "finished": sum(bool(one.get("finished")) for one in each)}
        for key in ("fault_to_first_new_step_s", "steps_lost"):
            values = [one[key] for one in each if one.get(key) is not None]
            row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None
        row["told"] = next((one["told"] for one in each if one.get("told")), [])
        row["errors"] = [one["error"] for one in each if "error" in one]
        table["systems"][name] = {**row, "others_share": [one.get("others_share") for one in each]}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
