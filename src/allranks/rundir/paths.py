"""Define every path of a run; create, list and find runs."""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from allranks.errors import EnvironmentNotAble, RequestError, RunNotFound
from allranks.rundir.files import make_folder, read_record
from allranks.utils.filesystem import owner_of
from allranks.utils.text import did_you_mean

_STEP = r"^step-(\d+)$"
_EVENTS = r"^rank(\d{1,9})\.jsonl$"
_TRACE = r"^rank(\d+)\.json\.gz$"
_ATTEMPT = r"^attempt-(\d+)$"


RUN_FOLDER_VARIABLE = "ALLRANKS_RUN_FOLDER"
"""Names the run folder to a user's own program."""


class _Below(property):
    """A path at a fixed place below the folder of a run."""

    def __init__(self, place: str) -> None:
        super().__init__(lambda run: run.root / place)

    def __get__(self, instance: Any, owner: type | None = None, /) -> Path:  # pyright: ignore
        return super().__get__(instance, owner)


class RunDir(Struct, frozen=True):
    """Folder of one run. No other code builds paths inside it."""

    root: Path

    spec = _Below("spec.yaml")
    plan = _Below("plan.json")
    run_args = _Below("run_args.json")
    preflight = _Below("preflight.json")
    preflight_text = _Below("preflight.txt")
    bundle = _Below("bundle.json")
    """Bundle packed on the login node for nodes that cannot access the files."""
    stage = _Below("stage.json")
    """Copies that each node uses, shared or staged, with hashes."""
    metrics = _Below("metrics.json")
    report = _Below("report.html")
    compare = _Below("compare.json")
    """Comparison request; only in the folder of a comparison."""
    engine_config = _Below("engine.json")
    """Final configuration of another library's engine, if a strategy uses one."""
    sbatch = _Below("job.sbatch")
    job = _Below("job.json")
    """Slurm's job id."""
    driver = _Below("logs/driver.json")
    """Last record of a Slurm job's driver: job, start number, and how it ended."""
    cancelled = _Below("logs/cancelled")
    """Exists once a user has cancelled a Slurm job, which is then not requeued."""
    restarts = _Below("restarts.json")
    """What was decided after each failed attempt, and why; absent if none was decided on."""
    function_call = _Below("function/call.pkl")
    """The function of `allranks.launch` with its arguments; mode 0600."""
    events = _Below("events")
    telemetry = _Below("telemetry")
    logs = _Below("logs")
    traces = _Below("traces")
    model = _Below("model")
    checkpoints = _Below("checkpoints")
    latest_checkpoint = _Below("checkpoints/latest")
    best_checkpoint = _Below("checkpoints/best")
    """Names the checkpoint with the lowest held-out loss; only with ``checkpoint.keep_best``."""

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def argument(self) -> str:
        """Return how commands in the current folder name this run: its path, unless it is in the default run root."""
        return self.name if self.root.parent == Path("runs").absolute() else shlex.quote(str(self.root))

    def events_of(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    def telemetry_of(self, host: str) -> Path:
        return self.telemetry / f"{host}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def logs_of(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def attempt_args(self, attempt: int) -> Path:
        """Return the path of what the launcher tells an attempt: how to resume, and when the attempt began."""
        return self.logs_of(attempt) / "args.json"

    def log_of(self, attempt: int, host: str, rank: int) -> Path:
        return self.logs_of(attempt) / f"{host}.rank{rank}.log"

    def error_file(self, attempt: int, host: str, rank: int) -> Path:
        """Return the path of ``TORCHELASTIC_ERROR_FILE``, which torch's decorator ``record`` writes."""
        return self.logs_of(attempt) / f"{host}.rank{rank}.error.json"

    def agent_log(self, attempt: int, host: str) -> Path:
        return self.logs_of(attempt) / f"{host}.agent.log"

    def agent_exit(self, attempt: int, host: str) -> Path:
        """Return the path of the record of how a node's ranks ended: exit codes, signals, who failed first."""
        return self.logs_of(attempt) / f"{host}.exit.json"

    def channel(self, attempt: int) -> Path:
        """Address of an attempt's driver, with the token, for agents and ``allranks cancel``; mode 0600."""
        return self.logs_of(attempt) / "channel.json"

    def rendezvous(self, attempt: int) -> Path:
        """Rendezvous of the ranks of several nodes; absent with one node."""
        return self.logs_of(attempt) / "rendezvous.json"

    def network(self, attempt: int) -> Path:
        """Network decisions for each node, with reasons and the expected transport."""
        return self.logs_of(attempt) / "network.json"

    def connections(self, attempt: int, host: str) -> Path:
        """Interfaces that a node's ranks used."""
        return self.logs_of(attempt) / f"{host}.connections.json"

    def hang(self, attempt: int) -> Path:
        """Evidence of stalled ranks."""
        return self.root / "hang" / f"attempt-{attempt}"

    def hang_report(self, attempt: int) -> Path:
        """Hang report: which rank stalled, and where; absent if none did."""
        return self.hang(attempt) / "hang.json"

    def hang_node(self, attempt: int, node: int) -> Path:
        """Evidence of one node."""
        return self.hang(attempt) / f"node{node}.json"

    def hang_stack(self, attempt: int, host: str, rank: int) -> Path:
        """Stacks of all threads of a rank."""
        return self.hang(attempt) / f"{host}.rank{rank}.stack.log"

    def hang_ras(self, attempt: int, node: int) -> Path:
        """Return the path of what NCCL's RAS reported to a node."""
        return self.hang(attempt) / f"nccl-ras.node{node}"

    def hang_flight(self, attempt: int, rank: int) -> Path:
        """Return the path of a rank's last collectives, written by torch's flight recorder."""
        return self.hang(attempt) / f"flight.rank{rank}"

    def function_value(self, attempt: int, rank: int) -> Path:
        """Value that the function of `allranks.launch` returned on a rank."""
        return self.root / "function" / f"attempt-{attempt}" / f"rank{rank}.pkl"

    def function_error(self, attempt: int, rank: int) -> Path:
        """Exception that it raised on a rank."""
        return self.function_value(attempt, rank).with_suffix(".error.json")

    def trace_of(self, rank: int, attempt: int | None = None) -> Path:
        """Return a rank's profiler trace: the newest, or that of ``attempt``."""
        folder = self.traces if attempt is None else self.traces / f"attempt-{attempt}"
        return folder / f"rank{rank}.json.gz"

    def event_files(self) -> dict[int, Path]:
        """Return the file of events of each rank that has one, ascending."""
        return {rank: self.events_of(rank) for rank in _numbered(self.events, _EVENTS)}

    def traced_ranks(self) -> list[int]:
        """Return ranks that have a profiler trace, ascending."""
        return _numbered(self.traces, _TRACE)

    def attempts(self) -> list[int]:
        """Return the numbers of attempts that have a log folder, ascending."""
        return _numbered(self.logs, _ATTEMPT)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of published checkpoints, ascending."""
        return _numbered(self.checkpoints, _STEP)

    def rank_logs(self, attempt: int) -> dict[int, Path]:
        """Return the log file of each rank in an attempt."""
        logs = {}
        for path in self.logs_of(attempt).glob("*.rank*.log"):
            number = path.name.rsplit(".rank", 1)[1].removesuffix(".log")
            if number.isdigit():
                logs[int(number)] = path
        return dict(sorted(logs.items()))


def _numbered(folder: Path, pattern: str) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := re.match(pattern, p.name)))


def restrict_permissions(run: RunDir, folder: Path | None = None) -> None:
    """Restrict all files of a run, also those of other libraries and Slurm, to users who may enter its folder.

    A run folder that others may enter (of an older run, or opened by its owner) is left as it is.

    Args:
        folder: only files below this folder of the run, or only this file.
    """
    allowed = run.root.stat().st_mode
    if allowed & 0o007:
        return
    if folder is not None and not folder.is_dir():
        _restrict(folder, group=bool(allowed & 0o040))
        return
    for parent, _, names in os.walk(folder or run.root):
        for path in (Path(parent), *(Path(parent) / name for name in names)):
            _restrict(path, group=bool(allowed & 0o040))


def _restrict(path: Path, *, group: bool) -> None:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return
        shared = stat.S_IMODE(mode) & ~0o007 | (0o050 if stat.S_ISDIR(mode) else 0o040)
        wanted = shared if group else stat.S_IMODE(mode) & ~0o077
        if wanted != stat.S_IMODE(mode):
            path.chmod(wanted)
    except OSError:  # another user's file, or a removed one
        return


def create_run(run_root: str | Path, name: str, now: float | None = None, *, group_readable: bool = False) -> RunDir:
    """Create a new, empty run folder ``<run_root>/<name>-<time>``; never reuse an existing one.

    Only its owner may enter it: specs, logs and checkpoints may be confidential.

    Args:
        group_readable: let the group read it, too. A setgid bit on `run_root` has the same effect.

    Raises:
        EnvironmentNotAble: the folder cannot be created or written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    root = Path(run_root).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            folder = root / (f"{name}-{stamp}" if attempt == 1 else f"{name}-{stamp}-{attempt}")
            try:
                folder.mkdir(0o700)
            except FileExistsError:
                continue
            if group_readable or root.stat().st_mode & stat.S_ISGID:
                folder.chmod(folder.stat().st_mode | 0o050)
            run = RunDir(folder)
            for sub in (run.logs, run.events, run.telemetry, run.checkpoints):
                make_folder(sub)
            return run
    except OSError as error:
        raise _not_makable(root, error) from None
    raise EnvironmentNotAble(f"run_root {root}: 1000 runs named {name}-{stamp} exist; choose another name")


def _not_makable(root: Path, error: OSError) -> EnvironmentNotAble:
    owner = f" ({owner_of(root)})" if isinstance(error, PermissionError) else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return EnvironmentNotAble(
        f"run_root {root}: cannot create a run folder there: {error.strerror}{owner}; "
        f"{'free space there or ' * full}choose another with --set run_root=FOLDER"
    )


def make_run_root(run_root: str | Path) -> Path:
    """Create the folder of the runs if needed, and check that it is writable before long work starts.

    Raises:
        EnvironmentNotAble: it cannot be created or written.
    """
    import tempfile

    root = Path(run_root).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="."):
            return root
    except OSError as error:
        raise _not_makable(root, error) from None


def is_run(folder: Path) -> bool:
    """Return whether this is a run folder; False also if it cannot be entered, where Path's method would raise."""
    return os.path.isfile(folder / "spec.yaml")  # noqa: PTH113


def list_runs(run_root: str | Path) -> list[RunDir]:
    """Return the runs under a folder, oldest first."""
    root = Path(run_root)
    try:
        folders = list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"cannot read run root {root}: {error.strerror}") from None
    runs = [RunDir(p.absolute()) for p in folders if is_run(p)]
    return sorted(runs, key=lambda run: (run.spec.stat().st_mtime, run.name))


def find_run(name: str, run_root: str | Path = "runs") -> RunDir:
    """Return a run by path, name, unique prefix of its name, or ``latest``.

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
            f"{name!r} matches several runs: {', '.join(run.name for run in matches)}; use a longer prefix"
        )
    if not runs:
        raise RunNotFound(
            f"there are no runs under {Path(run_root).absolute()}, so no {name!r}; use the run's path, or --run-root"
        )
    hint = did_you_mean(name, [run.name for run in runs], 0.4, "{}") or "; `allranks runs` lists the existing runs"
    raise RunNotFound(f"there is no run {name!r} under {Path(run_root).absolute()}{hint}")


def status_of(run: RunDir, *, alive: bool) -> str:
    """Return ``running``, the final status, or ``unfinished`` if the process that followed it was killed."""
    status = read_record(run.metrics).get("status")
    if alive:
        return "running"
    return "unfinished" if status in (None, "running") else str(status)
