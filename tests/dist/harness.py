"""Starts real gloo ranks on a case of `cases.py`, and whole runs through the command line."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from allranks.rundir.paths import RunDir
from tests import sampling, warm
from tests.conftest import remove_build_locks, tiny_spec, write_rows
from tests.warm import Warm

STUCK = Path(__file__).parent / "stuck"
Ended = subprocess.CompletedProcess[str]
ALLRANKS = [sys.executable, "-m", "allranks.cli.main"]


def shared_strategies() -> list[str]:
    """All that share work between ranks and can run here; DeepSpeed's are left out where it is not installed."""
    from allranks.spec.strategies import REGISTRY

    have = importlib.util.find_spec("deepspeed") is not None
    return [n for n, e in REGISTRY.items() if not e.single_process and (have or not n.startswith("deepspeed"))]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(case: str, world: int, tmp_path: Path, limit_s: float = 120, module: str = "cases", **args: Any) -> list:
    """The JSON value that each rank's case returned; fails with the ranks' output if one did not end well."""
    codes, outputs = end_of_ranks(case, world, tmp_path, limit_s, module, **args)
    ends = enumerate(zip(codes, outputs, strict=True))
    bad = [f"rank {r}, exit {c}:\n{o.read_text(errors='replace')[-3000:]}" for r, (c, o) in ends if c]
    assert not bad, "\n".join(bad)
    return [json.loads(output.with_suffix(".json").read_text()) for output in outputs]


def end_of_ranks(
    case: str, world: int, tmp_path: Path, limit_s: float = 120, module: str = "cases", **args: Any
) -> tuple[list[int], list[Path]]:
    """The exit status and the output of each rank of a case; what it returned lies beside the output."""
    port, args = str(free_port()), {"folder": tmp_path, **args}
    results = [tmp_path / f"{case}.{world}.{rank}.json" for rank in range(world)]
    outputs = [result.with_suffix(".out") for result in results]
    for file in (*results, *outputs):
        file.unlink(missing_ok=True)
    ranks = []
    for rank, (result, output) in enumerate(zip(results, outputs, strict=True)):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_WORLD_SIZE": str(args.get("ranks_per_node", world)),
        }  # fmt: skip
        argv = [module, case, str(result), json.dumps(args, default=str)]
        ranks.append(Warm.get("heavy").start("rank", argv, env, output))
    # After the imports before a first fork. Full matrices have more: other matrices with up to four ranks run beside.
    # Time in which ranks could run and other processes had the cores does not count.
    deadline = time.monotonic() + 30 + (3 * limit_s if sampling.ALL else limit_s)
    while late := [one for one in ranks if one.poll() is None]:
        if time.monotonic() > deadline + sum(seconds_in_run_queue(one.pid) for one in late):
            for one in late:
                one.kill()
            break
        with suppress(subprocess.TimeoutExpired):
            late[0].wait(1)
    return [one.wait(20) for one in ranks], outputs


def seconds_in_run_queue(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def write_spec(tmp_path: Path, spec: dict[str, Any]) -> Path:
    path = tmp_path / f"{spec['name']}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def allranks(*args: str, cwd: Path, limit_s: float = 180, code: int | None = None, **more: Any) -> Ended:
    """Run a verb to its end, which must be `code` if that is given."""
    try:
        done = warm.allranks(*args, cwd=cwd, timeout_s=limit_s, kind="heavy", **more)
    except subprocess.TimeoutExpired:
        remove_build_locks()  # what is killed for its time may leave the lock of a build, for which others would wait
        raise
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def rows_spec(folder: Path, rows: int = 60, **sections: Any) -> dict[str, Any]:
    """A spec that trains in a second or two, on rows that are written beside it."""
    write_rows(folder / "rows.json", rows)
    return tiny_spec(folder / "rows.json", folder, **sections)


def train(tmp_path: Path, spec: dict[str, Any], *more: str, **how: Any) -> tuple[Ended, RunDir]:
    """`allranks run` to its end, and its folder. `how`: see `allranks`."""
    before = set(folders(tmp_path))
    done = allranks("run", str(write_spec(tmp_path, spec)), *more, cwd=tmp_path, **how)
    (new,) = set(folders(tmp_path)) - before
    return done, RunDir(new)


def memory_is_as_estimated(run: RunDir) -> None:
    """What `plan` says of a rank's memory, against the most that a rank had; measured for torch without CUDA alone."""
    import torch

    from allranks.planning.memory import fit
    from allranks.planning.memory.estimate import ESTIMATE_ERROR
    from allranks.planning.planner import make_plan
    from allranks.spec import load_spec
    from allranks.utils.machine import machine_facts

    if torch.version.cuda is not None:
        return
    spec, facts = load_spec(run.spec), machine_facts()
    estimated = fit(spec, make_plan(spec, facts), facts).needed_bytes
    measured = json.loads(run.metrics.read_text())["peak_memory_bytes"]
    assert abs(estimated / measured - 1) <= ESTIMATE_ERROR, f"{estimated >> 20} MiB, measured {measured >> 20} MiB"


def weights_of(run: RunDir, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = run.checkpoint(step).glob("*model.safetensors")
    return load_file(file)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return len(one) > 0 and one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def folders(tmp_path: Path) -> list[Path]:
    root = tmp_path / "runs"
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def stall_ranks(environment: pytest.MonkeyPatch, what: str, seconds: float = 0) -> None:
    environment.setenv("PYTHONPATH", os.pathsep.join([str(STUCK), os.environ.get("PYTHONPATH", "")]))
    environment.setenv("STUCK", what)
    environment.setenv("STUCK_S", str(seconds))


def slow_down(environment: pytest.MonkeyPatch, batch_s: float, ranks: int = 2) -> None:
    """Let the ranks of a run that has no end wait at each batch, so that other tests have the cores."""
    stall_ranks(environment, ";".join(f"sleep_a_while:{rank}:-1" for rank in range(ranks)), batch_s)


class Background:
    def __init__(self, tmp_path: Path, *args: str) -> None:
        before = set(folders(tmp_path))
        self.out = tmp_path / "background.out"
        self.process = warm.start_verb(args, self.out, cwd=tmp_path, session=True)
        until(lambda: set(folders(tmp_path)) - before or args[0] == "resume" or self.process.poll() is not None)
        new = sorted(set(folders(tmp_path)) - before)
        self.run = RunDir(tmp_path / "runs" / args[1] if args[0] == "resume" else new[-1])

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        from allranks.rundir.events import read_events

        return list(read_events(self.run.events_of(rank)))

    def until_step(self, step: int, attempt: int = 1) -> None:
        """Until every rank of the attempt has begun, and rank 0 has done the step in it."""
        until(lambda: self._has_done(step, attempt) or self.process.poll() is not None)

    def _has_done(self, step: int, attempt: int) -> bool:
        ranks = [int(p.stem.removeprefix("rank")) for p in self.run.events.glob("rank*.jsonl")]
        starts = {r: [e for e in self.events(r) if e["event"] == "start" and e["attempt"] >= attempt] for r in ranks}
        if 0 not in starts or not all(starts.values()):
            return False
        began = starts[0][-1]["time"]
        return any(e["event"] == "step" and e["step"] >= step and e["time"] >= began for e in self.events())

    def pid_of(self, rank: int) -> int:
        return [e for e in self.events(rank) if e["event"] == "start"][-1]["pid"]

    def all_pids(self) -> list[int]:
        return [p.pid for p in psutil.Process(self.process.pid).children(recursive=True)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = 120) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout=limit_s)
        finally:
            self.stop()
        return code, self.out.read_text()

    def stop(self) -> None:
        """End the launcher and every process of its run, whatever state they are in."""
        self.process.kill()
        self.process.wait(timeout=10)
        for process in psutil.process_iter(["cmdline"]):
            if str(self.run.root) in (process.info["cmdline"] or []):
                process.kill()


def fill_disk(folder: Path) -> None:
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def until(condition: Callable[[], object], limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def step_events(run: RunDir, rank: int = 0) -> list[dict[str, Any]]:
    from allranks.analysis.metrics import without_repeated_steps
    from allranks.rundir.events import read_events

    return [e for e in without_repeated_steps(list(read_events(run.events_of(rank)))) if e["event"] == "step"]
