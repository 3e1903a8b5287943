"""What every rank runs first: its own log file, then the work. ``python -m allranks.launch.rank RUN ATTEMPT``.

The log is opened before anything heavy is imported, so that even a failing import is in it, and it is written
without buffers, so that a kill loses nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from allranks.facts import host_name
from allranks.hang import inside as watched
from allranks.rundir import RunDir

PR_SET_PDEATHSIG = 1


def main() -> None:
    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    _open_log(run.log_of(attempt, host_name(), rank))
    end_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    watched.start(run, attempt, rank)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"[RANK {rank}] WORLD_SIZE={os.environ['WORLD_SIZE']} {host_name()} pid {os.getpid()} {started}", flush=True)  # noqa: T201
    code = _work(run, attempt, rank)
    if code == 0:
        done_marker(run, attempt, rank).touch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries (NCCL, gloo, telemetry) must not hold up the end


def done_marker(run: RunDir, attempt: int, rank: int) -> Path:
    """Exists once the rank has ended well: tells a clean end from a disappearance."""
    return run.logs_of(attempt) / f".rank{rank}.done"


def _open_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent is gone: no rank is ever left behind."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux; torchrun's own clean-up remains
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _work(run: RunDir, attempt: int, rank: int) -> int:
    try:
        from allranks.spec import load_spec
        from allranks.stage import spec_here

        script = spec_here(load_spec(run.spec), run.stage).script
        if script is not None:
            from allranks.launch.user_script import run_script

            return run_script(run, script, attempt)
        if run.compare.exists():
            from allranks.train.compare.worker import work as compare

            return compare(run, attempt)
        from allranks.train.worker import work

        return work(run, attempt)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: say it, record it, end
        traceback.print_exc()
        _record(run, attempt, rank, error)
        return int(getattr(error, "exit_code", 1)) or 1


def _record(run: RunDir, attempt: int, rank: int, error: BaseException) -> None:
    """Note the error as an event. (A program of the user's own may have changed ``sys.argv`` by now.)"""
    from allranks.launch.blame import is_echo
    from allranks.observe.events import EventLog
    from allranks.redact import redact

    message = redact(str(error))
    log = EventLog(run.events_of(rank), rank)
    log.write(
        "error",
        type=type(error).__name__,
        message=message[:2000],
        step=getattr(error, "step", None),
        attempt=attempt,
        exit_code=int(getattr(error, "exit_code", 1)) or 1,
        known=hasattr(error, "exit_code"),
        echo=is_echo(type(error).__name__, message),
    )
    log.close()


if __name__ == "__main__":
    main()
