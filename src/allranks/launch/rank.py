"""Entry point of every rank: open its log file, then do the work. ``python -m allranks.launch.rank RUN ATTEMPT``.

The log is opened before heavy imports, so that it records failing imports, and it is unbuffered, so that a kill loses
nothing.

How a rank ends:

- After success it leaves the process group, runs its exit handlers, finally writes the phase ``done`` to its heartbeat
  page, and exits with code 0. Code 0 without ``done`` means that something ended the process early (``os._exit(0)``).
- After an error it first prints the traceback, records the event, and writes the error to its heartbeat page. It never
  calls ``destroy_process_group``: under NCCL that waits for peers which wait for this rank.
- Exit handlers and non-daemon threads get a bounded time, then the process ends without them. A user's own program that
  has come to its end may work on in threads as long as it likes, as in Python.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace, TracebackType

from allranks.launch.process_guard import AGENT_PID_VARIABLE, PROGRAM_VARIABLE
from allranks.rundir.files import open_append
from allranks.rundir.heartbeat import DONE_PHASE, FINISH_PHASE, heartbeat
from allranks.rundir.paths import RunDir
from allranks.train import rank_hooks as watched
from allranks.utils.machine import host_name, no_garbage_collection

PR_SET_PDEATHSIG = 1
EXIT_HANDLERS_S = 60.0  # after success: a logger may still send metrics
EXIT_HANDLERS_FAILED_S = 10.0  # after an error: the peers are waiting
_USER_SCRIPT, _USER_FUNCTION = (
    str(Path(__file__).parents[1] / "train" / name) for name in ("user_script.py", "user_function.py")
)
BLOCKED_INTERPRETER_S = 10.0  # more, if a call into C holds the interpreter; then faulthandler ends the process


def main() -> None:
    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    _open_log(run.log_of(attempt, host_name(), rank))
    agent = os.environ.get(AGENT_PID_VARIABLE, "")
    end_with_parent(parent=int(agent) if agent.isdigit() else None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    watched.start_rank_hooks(run, attempt, rank)
    started, own = time.strftime("%Y-%m-%d %H:%M:%S"), os.getpid()
    world_size = os.environ["WORLD_SIZE"]
    print(f"[RANK {rank}] WORLD_SIZE={world_size} {host_name()} pid {own} {started}", flush=True)  # noqa: T201
    code, complete, own_program = _work(run, attempt, rank, own)
    if os.getpid() == own:
        if complete and own_program:
            try:  # non-daemon threads have no time limit
                threading._shutdown()  # type: ignore[attr-defined] - called by Python at exit
            except BaseException:  # noqa: BLE001 - the signal handler of the program has raised
                _print(traceback.format_exc())
        if complete:
            heartbeat.phase(FINISH_PHASE)
        _run_exit_handlers(code, complete)
        if complete:
            heartbeat.phase(DONE_PHASE)
    _flush()
    os._exit(code)  # threads of libraries (NCCL, Gloo, telemetry) must not delay the exit


def _open_log(path: Path) -> None:
    fd = open_append(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Request a signal from the kernel when the parent exits, so that no process is left behind.

    Args:
        parent: the expected parent process; a different one means that it has already exited.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux
    now = os.getppid()
    if now == 1 if parent is None else now != parent:
        os.kill(os.getpid(), number)


def _work(run: RunDir, attempt: int, rank: int, own: int) -> tuple[int, bool, bool]:
    """Run the work; return exit code, whether it finished by itself, and whether it then was a user's own program."""
    try:
        return 0, True, _start(run, attempt)
    except SystemExit as end:
        code = _print_exit(end)
        if os.getpid() == own:
            _record_exit(run, attempt, rank, code, end)
        return code, False, False
    except BaseException as error:  # noqa: BLE001 - top level of the process: print, record, exit
        code = int(getattr(error, "exit_code", 1)) or 1
        _print_error(error)
        if os.getpid() == own:
            heartbeat.failure(f"{type(error).__name__}: {_text_of(error)}")
            _record_error(run, attempt, rank, error, code)
        return code, False, False


def _start(run: RunDir, attempt: int) -> bool:
    """Do the work that the run folder describes; return whether it was a user's own program."""
    if given := os.environ.pop(PROGRAM_VARIABLE, ""):  # `allranks torchrun`: each node's own command line
        from allranks.train.user_script import run_user_script

        program = json.loads(given)
        run_user_script(run, SimpleNamespace(**program), attempt, program["args"])
        return True
    from allranks.nodes.staging.manifests import spec_here
    from allranks.spec import load_spec

    spec = spec_here(load_spec(run.spec), run.stage)
    if spec.script is not None:
        from allranks.planning.rank_environment import SCRIPT_ARGS, script_arguments
        from allranks.train.user_script import run_user_script

        arguments = script_arguments(spec.script, dict(os.environ))
        os.environ.pop(SCRIPT_ARGS, None)
        run_user_script(run, spec.script, attempt, arguments)
    elif run.compare.exists():
        with no_garbage_collection():
            from allranks.train.benchmark.worker import run_benchmark_rank

        run_benchmark_rank(run, attempt, spec)
    else:
        with no_garbage_collection():
            from allranks.train.worker import run_rank

        run_rank(run, attempt, spec)
    return spec.script is not None


def _print_error(error: BaseException) -> None:
    """Print an error and traceback, for a user's own program from its code on and by its ``sys.excepthook``."""
    frames = list(_frames(error.__traceback__))
    ours = [frame for frame in frames if frame.tb_frame.f_code.co_filename in (__file__, _USER_SCRIPT, _USER_FUNCTION)]
    begin = next((frame for frame in frames if frame not in ours), None)
    if not any(frame.tb_frame.f_code.co_filename == _USER_SCRIPT for frame in ours) or not (
        begin or isinstance(error, SyntaxError)
    ):
        _print(traceback.format_exc())
        return
    error.__traceback__ = begin  # Python's own hook, which others call, prints this one and not its argument
    if sys.excepthook is not sys.__excepthook__:
        try:
            sys.excepthook(type(error), error, begin)
            return
        except BaseException:  # noqa: BLE001 - the hook is the program's; as in Python, the error itself is printed too
            _print(f"Error in sys.excepthook:\n{traceback.format_exc()}\nOriginal exception was:\n")
    _print("".join(traceback.format_exception(type(error), error, begin)))


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _print_exit(end: SystemExit) -> int:
    """Return the code of ``sys.exit``; a text is printed to standard error and means 1, as in Python itself."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    _print(f"{_text_of(end.code)}\n")
    return 1


def _record_exit(run: RunDir, attempt: int, rank: int, code: int, end: SystemExit) -> None:
    """Record the event ``exit``, not ``error``: a program may exit because a peer has failed, which is the cause."""
    text = "" if end.code is None or isinstance(end.code, int) else _text_of(end.code)
    if code:
        heartbeat.failure(f"sys.exit: {text or f'exit code {code}'}")
    _record(run, rank, "exit", attempt=attempt, exit_code=code, message=text)


def _record_error(run: RunDir, attempt: int, rank: int, error: BaseException, code: int) -> None:
    """Record the event ``error``. (The user's own program may have changed ``sys.argv``.)"""
    from allranks.errors import NonFiniteLoss
    from allranks.launch.failure_attribution import is_peer_error

    message = _text_of(error)
    _record(
        run,
        rank,
        "error",
        type=type(error).__name__,
        message=message,
        step=error.step if isinstance(error, NonFiniteLoss) else None,
        attempt=attempt,
        exit_code=code,
        known=hasattr(error, "exit_code"),
        echo=is_peer_error(type(error).__name__, message),
    )


def _record(run: RunDir, rank: int, event: str, *, message: str, **fields: object) -> None:
    """Write an event. A failure to do so (full disk) is printed; the log already contains the content."""
    try:
        from allranks.rundir.events import EventLog
        from allranks.utils.redaction import redact

        with EventLog(run.events_of(rank), rank) as log:
            log.write(event, message=redact(message)[:2000], **fields)
    except Exception as problem:  # noqa: BLE001 - must not replace the error that it should record
        _print(f"allranks: cannot record the event {event!r} of rank {rank}: {problem}\n")


def _text_of(error: object) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the program's own exception class may fail
        return "(its message cannot be shown)"


def _run_exit_handlers(code: int, complete: bool) -> None:
    """Wait for non-daemon threads, then run the functions registered with ``atexit``, as Python does at exit.

    Both have a time limit, after which the process exits with its code and a line in the log. An interpreter that a C
    call blocks exits with a dump of its stacks and code 1.
    """
    limit_s = EXIT_HANDLERS_FAILED_S if code else EXIT_HANDLERS_S
    faulthandler.dump_traceback_later(limit_s + BLOCKED_INTERPRETER_S, exit=True, file=2)  # sys.stderr may be closed
    with suppress(RuntimeError):  # no thread can be started: the limit above still applies
        threading.Thread(
            target=_end_after_timeout, args=(limit_s, code, complete), name="allranks-exit", daemon=True
        ).start()
    try:
        threading._shutdown()  # type: ignore[attr-defined] - called by Python at exit: ends executors, joins threads
        atexit._run_exitfuncs()  # type: ignore[attr-defined] - called by Python at exit: runs the handlers
    except BaseException:  # noqa: BLE001 - a handler of the program has failed; as in Python, the exit code stays
        _print(traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()


def _end_after_timeout(limit_s: float, code: int, complete: bool) -> None:
    """Exit the process after a time limit, whatever its main thread does."""
    time.sleep(limit_s)
    others = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    what = f"threads {', '.join(others)}" if others else "exit handlers"
    _print(
        f"allranks: {what} of the program did not finish within {limit_s:g} s; the process exits without waiting for "
        "them\n"
    )
    if complete:
        heartbeat.phase(DONE_PHASE)
    _flush()
    os._exit(code)


def _print(text: str) -> None:
    """Write to standard error; ignore errors, because the program may have closed it, or the disk may be full."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the program may have replaced the stream
        with suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, replaced, or on a full disk
            stream.flush()


if __name__ == "__main__":
    main()
