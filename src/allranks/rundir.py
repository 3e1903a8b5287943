"""Every path of a run, in one place; creating, listing and finding runs."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import EnvironmentNotAble, RequestError, RunNotFound

_STEP = re.compile(r"^step-(\d+)$")
_TRACE = re.compile(r"^rank(\d+)\.json\.gz$")
_ATTEMPT = re.compile(r"^attempt-(\d+)$")


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Nothing else builds paths inside it."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def run_args(self) -> Path:
        return self.root / "run_args.json"

    @property
    def preflight(self) -> Path:
        return self.root / "preflight.json"

    @property
    def preflight_text(self) -> Path:
        return self.root / "preflight.txt"

    @property
    def bundle(self) -> Path:
        """What the login side packed, because the nodes cannot see it."""
        return self.root / "bundle.json"

    @property
    def stage(self) -> Path:
        """What each node uses: shared or staged copies, with hashes."""
        return self.root / "stage.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def compare(self) -> Path:
        """What is to be compared; only in the folder of a comparison."""
        return self.root / "compare.json"

    @property
    def engine_config(self) -> Path:
        """The final configuration of another library's engine, where a strategy has one."""
        return self.root / "engine.json"

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    def telemetry_of(self, host: str) -> Path:
        return self.telemetry / f"{host}.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def logs_of(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def log_of(self, attempt: int, host: str, rank: int) -> Path:
        return self.logs_of(attempt) / f"{host}.rank{rank}.log"

    def agent_log(self, attempt: int, host: str) -> Path:
        return self.logs_of(attempt) / f"{host}.agent.log"

    def agent_exit(self, attempt: int, host: str) -> Path:
        """What became of a node's ranks: exit codes, signals, who failed first."""
        return self.logs_of(attempt) / f"{host}.exit.json"

    @property
    def sbatch(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def job(self) -> Path:
        """The number that Slurm gave."""
        return self.root / "job.json"

    @property
    def driver(self) -> Path:
        """What the driver of a Slurm job has said last: which start of which job it is, and how it ended."""
        return self.logs / "driver.json"

    @property
    def cancelled(self) -> Path:
        """There once a person has asked a Slurm job to end: it does not go back to the queue."""
        return self.logs / "cancelled"

    def control(self, attempt: int) -> Path:
        """``stop`` or ``kill``, for agents that no signal reaches."""
        return self.logs_of(attempt) / "control"

    def rendezvous(self, attempt: int) -> Path:
        """Where the ranks of several nodes meet; absent on one node, which needs none."""
        return self.logs_of(attempt) / "rendezvous.json"

    def network(self, attempt: int) -> Path:
        """What was decided for each node's network, with reasons, and what its ranks should get by it."""
        return self.logs_of(attempt) / "network.json"

    def connections(self, attempt: int, host: str) -> Path:
        """Over which interfaces a node's ranks really talked."""
        return self.logs_of(attempt) / f"{host}.connections.json"

    def hang(self, attempt: int) -> Path:
        """What was found out about ranks that stood still."""
        return self.root / "hang" / f"attempt-{attempt}"

    def hang_report(self, attempt: int) -> Path:
        """Which rank fell out, and where it stood; absent where none did."""
        return self.hang(attempt) / "hang.json"

    def hang_node(self, attempt: int, node: int) -> Path:
        """The evidence of one node."""
        return self.hang(attempt) / f"node{node}.json"

    def hang_stack(self, attempt: int, host: str, rank: int) -> Path:
        """Where all threads of a rank stood."""
        return self.hang(attempt) / f"{host}.rank{rank}.stack.log"

    def hang_flight(self, attempt: int, rank: int) -> Path:
        """A rank's last collectives, as torch's flight recorder writes them."""
        return self.hang(attempt) / f"flight.rank{rank}"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def trace_of(self, rank: int, attempt: int | None = None) -> Path:
        """A rank's profiler trace: the newest, or with ``attempt`` that of an earlier one."""
        folder = self.traces if attempt is None else self.traces / f"attempt-{attempt}"
        return folder / f"rank{rank}.json.gz"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    @property
    def latest_checkpoint(self) -> Path:
        return self.checkpoints / "latest"

    @property
    def model(self) -> Path:
        return self.root / "model"

    def traced_ranks(self) -> list[int]:
        """Ranks that have a profiler trace, ascending."""
        return _numbered(self.traces, _TRACE)

    def attempts(self) -> list[int]:
        """Numbers of the attempts that have a log folder, ascending."""
        return _numbered(self.logs, _ATTEMPT)

    def checkpoint_steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending."""
        return _numbered(self.checkpoints, _STEP)

    def rank_logs(self, attempt: int) -> dict[int, Path]:
        """Log file of each rank in an attempt."""
        found = {}
        for path in self.logs_of(attempt).glob("*.rank*.log"):
            number = path.name.rsplit(".rank", 1)[1].removesuffix(".log")
            if number.isdigit():
                found[int(number)] = path
        return dict(sorted(found.items()))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := pattern.match(p.name)))


def create_run(run_root: str | Path, name: str, now: float | None = None) -> RunDir:
    """Make a new, empty run folder ``<run_root>/<name>-<time>``; never an existing one.

    Raises:
        EnvironmentNotAble: the folder cannot be made or written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    root = Path(run_root).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            folder = root / (f"{name}-{stamp}" if attempt == 1 else f"{name}-{stamp}-{attempt}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            run = RunDir(folder)
            for sub in (run.logs, run.events, run.telemetry, run.checkpoints):
                sub.mkdir()
            return run
    except OSError as error:
        raise _not_makable(root, error) from None
    raise EnvironmentNotAble(f"run_root {root}: 1000 runs named {name}-{stamp} exist; choose another name")


def _not_makable(root: Path, error: OSError) -> EnvironmentNotAble:
    return EnvironmentNotAble(
        f"run_root {root}: no run folder can be made there: {error.strerror}; give another with --set run_root=FOLDER"
    )


def make_run_root(run_root: str | Path) -> Path:
    """The folder of the runs, made if need be, so that a long climb does not find out at its end that it cannot write.

    Raises:
        EnvironmentNotAble: it cannot be made, or nothing can be made in it.
    """
    root = Path(run_root).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="."):
            return root
    except OSError as error:
        raise _not_makable(root, error) from None


def is_run(folder: Path) -> bool:
    """True for a run's folder; False also for one that may not be entered, where a Path's own method would raise."""
    return os.path.isfile(folder / "spec.yaml")  # noqa: PTH113


def list_runs(run_root: str | Path) -> list[RunDir]:
    """Runs under a folder, oldest first."""
    root = Path(run_root)
    try:
        folders = list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"run root {root} is no folder that can be read: {error.strerror}") from None
    runs = [RunDir(p.absolute()) for p in folders if is_run(p)]
    return sorted(runs, key=lambda run: (run.spec.stat().st_mtime, run.name))


def find_run(name: str, run_root: str | Path = "runs") -> RunDir:
    """A run by path, by name, by the beginning of its name (if only one matches), or ``latest``.

    Raises:
        RunNotFound: nothing or several match; the message lists them.
    """
    path = Path(name)
    if is_run(path):
        return RunDir(path.absolute())
    runs = list_runs(run_root)
    if name == "latest" and runs:
        return runs[-1]
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RunNotFound(
            f"{name!r} fits several runs: {', '.join(run.name for run in matches)}; give more of the name"
        )
    if not runs:
        raise RunNotFound(
            f"there are no runs under {Path(run_root).absolute()}, so no {name!r}; give the run's own path, or --run-root"
        )
    near = difflib.get_close_matches(name, [run.name for run in runs], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "; `allranks runs` lists what there is"
    raise RunNotFound(f"there is no run {name!r} under {Path(run_root).absolute()}{hint}")


def write_text_atomic(path: Path, text: str) -> None:
    """Write a whole file or nothing: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk must not keep halves
        raise


def write_json(path: Path, value: Any) -> None:
    """Atomic, indented, strict JSON (NaN is refused by the format, so it is written as null)."""
    write_text_atomic(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same value with NaN and infinities replaced by None: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """A JSON file's content, or None where it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def status_of(run: RunDir, *, alive: bool) -> str:
    """``running``, the verdict of its end, or ``unfinished`` where whoever followed the run was killed before there was one."""
    told = (read_json(run.metrics) or {}).get("status")
    if alive:
        return "running"
    return "unfinished" if told in (None, "running") else str(told)
