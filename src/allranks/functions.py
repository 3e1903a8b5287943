"""``allranks.launch(function, ...)``: run a Python function on all ranks of a run, and return their values.

The function runs as the ranks' own program (``script: {module: allranks.train.user_function}``), so that checks, logs,
hang detection, diagnosis and restarts are those of every run.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.errors import AllranksError, FunctionFailed, FunctionTimedOut, RequestError
from allranks.launch.outcome import RunResult
from allranks.launch.preview import prepare
from allranks.launch.process_guard import AGENT_PID_VARIABLE
from allranks.launch.runs import NullObserver, Observer, cancel, create
from allranks.launch.runs import launch as launch_run
from allranks.rundir import function_files
from allranks.rundir.paths import RunDir
from allranks.spec.launchers import DEFAULT_LAUNCHER

RETRY_S = 1.0
KILL_AFTER_S = 30.0  # beyond script.grace_s
PROGRAM = "allranks.train.user_function"


class FunctionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a function returned on each rank: ``result[rank]``, ``len(result)``, ``list(result)``."""

    values: list[Any]
    folder: Path
    """The run folder, with logs and report."""
    metrics: dict[str, Any]
    """Content of metrics.json."""

    def __getitem__(self, rank: int) -> Any:
        return self.values[rank]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nodes: int = 1,
    procs_per_node: int | Literal["auto"] = "auto",
    launcher: str = DEFAULT_LAUNCHER,
    init: Literal["gloo", "nccl"] | None = None,
    timeout_s: float | None = None,
    name: str | None = None,
    run_root: str | Path = "runs",
    cluster: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    output: Literal["rank0", "all", "none"] = "rank0",
) -> FunctionResult:
    """Run ``fn(*args, **kwargs)`` on all ranks and wait for them.

    The ranks have torchrun's environment variables, and nothing else is set up unless `init` says so.

    Args:
        fn: a function of a module that the ranks can import; with cloudpickle installed, any function, also of a
            notebook, a script or another function.
        procs_per_node: ranks per node; auto = one per GPU, two without GPUs.
        launcher: local, slurm (waits for the job; `run_root` must be shared) or another value of `cluster.launcher`.
        init: make the process group with this backend before the call, and destroy it afterwards; None: `fn` does
            that itself, as a program under torchrun.
        timeout_s: end the ranks after this time, which counts from the start of the ranks or the job's submission.
        cluster: further keys of the spec's section `cluster`, such as ``{"slurm": {"partition": "gpu"}}``.
        sets: further keys as ``"section.key=value"``, as for ``--set``.
        output: ranks whose output is shown; none: nothing is shown.

    Returns:
        The values, by rank, and the run folder.

    Raises:
        Exception: what `fn` raised on the rank that failed first. A note names rank, host and log, and has the
            traceback of that rank.
        FunctionFailed: a rank failed in another way (a signal, a hang, an exit code), or its exception cannot be
            rebuilt in this process.
        FunctionTimedOut: after `timeout_s`.
        RequestError: function or options cannot be used; nothing was started.
        EnvironmentNotAble: this machine cannot run it.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended.
    """
    if AGENT_PID_VARIABLE in os.environ:
        raise RequestError(
            "allranks.launch was called by a rank: the ranks import the module of the function, so put the call under "
            "if __name__ == '__main__':"
        )
    for option, value, known in (("init", init, (None, "gloo", "nccl")), ("output", output, ("rank0", "all", "none"))):
        if value not in known:
            raise RequestError(f"{option}={value!r}: expected {', '.join(map(repr, known))}")
    called = getattr(fn, "__qualname__", type(fn).__name__)
    function = _pickled(fn, tuple(args), dict(kwargs or {}), called)
    ranks = {} if procs_per_node == "auto" else {"procs_per_node": procs_per_node}
    spec = {
        "name": name or re.sub(r"[^A-Za-z0-9_-]+", "-", called).strip("-_")[:60] or "function",
        "script": {"module": PROGRAM, "args": [called]},
        "cluster": {"launcher": launcher, "nodes": nodes, **ranks, **(cluster or {})},
        "run_root": str(run_root),
    }
    prepared = prepare(spec, sets)
    run_dir, plan = create(prepared)
    header = function_files.CallHeader(
        python=function_files.python_version(),
        sources=function_files.typed_sources(),
        path=function_files.caller_path(),
        init=init,
        timeout_s=prepared.spec.cluster.timeout_s,
    )
    function_files.write_call(run_dir, header, function)
    with _observer(output) as observer, _time_limit(run_dir, timeout_s, plan.grace_s or 0.0) as expired:
        result = launch_run(run_dir, prepared.spec, plan, attempt=1, observer=observer)
    if result.status == "succeeded":
        attempt = max(run_dir.attempts())
        values = [function_files.read_value(run_dir, attempt, rank) for rank in range(plan.world_size)]
        return FunctionResult(values=values, folder=run_dir.root, metrics=result.metrics)
    if result.interrupted:
        raise KeyboardInterrupt(f"{result.message}. Run folder: {run_dir.root}")
    if expired.is_set():
        raise FunctionTimedOut(
            f"{called} did not end within timeout_s={timeout_s:g}: {result.message}. Run folder: {run_dir.root}",
            run_dir.root,
            result.metrics,
        )
    raise _error_of(run_dir, result)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], called: str) -> bytes:
    plain = not function_files.has_cloudpickle()
    more = "; install cloudpickle (pip install cloudpickle), or move what is named to a module" * plain
    try:
        data = function_files.pickled((fn, args, kwargs))
    except Exception as error:
        raise RequestError(
            f"{called} and its arguments cannot be sent to the ranks: {type(error).__name__}: {error}{more}"
        ) from error
    if plain and b"__main__" in data:  # the main program of a rank is another one
        raise RequestError(f"{called} or an argument is defined in a notebook or the main script{more}")
    return data


@contextmanager
def _observer(output: str) -> Iterator[Observer]:
    if output == "none":
        yield NullObserver()
        return
    from allranks.cli.console import SafeConsole
    from allranks.cli.run import ProgressView

    with ProgressView(SafeConsole(force_jupyter=False), output) as view:
        yield view


@contextmanager
def _time_limit(run: RunDir, timeout_s: float | None, grace_s: float) -> Iterator[threading.Event]:
    """End the run after `timeout_s`; yield an event that is set then."""
    ended, expired = threading.Event(), threading.Event()

    def stop() -> None:
        if ended.wait(timeout_s):
            return
        expired.set()
        for now, wait_s in ((False, grace_s + KILL_AFTER_S), (True, RETRY_S)):
            while not ended.is_set():
                with suppress(AllranksError, OSError):  # a run that is starting cannot be reached yet
                    cancel(run, now=now)
                    break
                ended.wait(RETRY_S)
            ended.wait(wait_s)

    if timeout_s is not None:
        threading.Thread(target=stop, name="allranks-timeout", daemon=True).start()
    try:
        yield expired
    finally:
        ended.set()


def _error_of(run: RunDir, result: RunResult) -> Exception:
    """Return the exception of the rank that failed first, else an error with the message of the run."""
    failure = result.metrics.get("failure") or {}
    rank: int | None = failure.get("rank")
    attempt = max(run.attempts(), default=1)
    raised = None if rank is None else function_files.read_error(run, attempt, rank)
    general = FunctionFailed(f"{result.message}. Run folder: {run.root}", run.root, result.metrics)
    if rank is None or raised is None:
        return general
    record, error = raised
    error = general if error is None or isinstance(error, AllranksError) else error  # the message of the run has a rank
    log = run.rank_logs(attempt).get(rank)
    error.add_note(f"rank {rank} on {failure.get('host')} raised {record.type}. Log: {log}\n\n{record.traceback}")
    return error
