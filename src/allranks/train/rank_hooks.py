"""Serve the agent's requests in a rank: dump stacks on a signal, and write the flight recorder.

A heartbeat thread reports twice a second that Python is running, with the numbers of the last collectives. torch is
used only if the rank has imported it. Nothing in this module may end a rank or write a traceback to its log: monitoring
failures are recorded in the heartbeat page (`allranks.rundir.heartbeat.Heartbeat.monitor_error`).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.rundir.files import open_append
from allranks.rundir.heartbeat import DUMP_SIGNAL, HEARTBEAT_VARIABLE, heartbeat
from allranks.rundir.paths import RunDir
from allranks.train.patches import let_collectives_end

HEARTBEAT_INTERVAL_S = 0.5
MAX_DUMP_BYTES = 8 << 20
STACK_FRAMES = 12


def start_rank_hooks(run: RunDir, attempt: int, rank: int) -> None:
    """Open the agent's heartbeat page and start the heartbeat thread. Do nothing without an agent."""
    pages = os.environ.get(HEARTBEAT_VARIABLE, "").split(",")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    page, _, stacks = (pages[local] if local < len(pages) else "").partition(":")
    if not page:
        return
    try:
        heartbeat.open(page)
    except (OSError, ValueError) as error:  # it is in the agent's /proc, which another user or container may not open
        print(f"allranks: this rank is not monitored: {error}", flush=True)  # noqa: T201 - the rank's log
        return
    heartbeat.phase("start")
    try:
        file = Path(stacks).open("ab", buffering=0)  # noqa: SIM115 - open as long as the process lives
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        target = run.hang_flight(attempt, rank)
        threading.Thread(target=_heartbeat_loop, args=(target,), name="allranks-pulse", daemon=True).start()
    except Exception as error:  # noqa: BLE001 - monitoring never ends a rank; threads may be at their limit
        heartbeat.monitor_error(_error_text(error))


def _heartbeat_loop(target: Path) -> None:
    """Report until the process ends. Failures are recorded in the page, neither raised nor printed."""
    while True:
        try:
            _report(target)
        except Exception as error:  # noqa: BLE001 - the next report may succeed
            with suppress(Exception):  # the page itself may be what fails
                heartbeat.monitor_error(_error_text(error))
        time.sleep(HEARTBEAT_INTERVAL_S)


def _report(target: Path) -> None:
    """Write one heartbeat and serve the agent's request; failures are recorded in the page."""
    problem, sequences = "", {}
    try:
        sequences = _sequences()
    except Exception as error:  # noqa: BLE001 - private names of torch, in a process that may be importing or ending
        problem = _error_text(error)
    heartbeat.alive(sequences, _main_stack() if heartbeat.in_script else ())
    if heartbeat.asked:
        try:
            _write_flight_record(target)
        except Exception as error:  # noqa: BLE001 - as above
            problem = problem or _error_text(error)
        heartbeat.answered()
    heartbeat.monitor_error(problem)


def _main_stack() -> list[str]:
    """Return the innermost frames of the main thread, as ``file:function``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[str] = []
    while frame is not None and len(frames) < STACK_FRAMES:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    return frames


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _sequences() -> dict[str, int]:
    """Return the number of the last collective of each group of this rank; empty while torch is being imported."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    let_collectives_end(c10d)
    initialized = getattr(c10d, "is_initialized", None)
    world = getattr(c10d, "_world", None)
    if initialized is None or world is None or not initialized():
        return {}
    numbers = {}
    for group in list(world.pg_map):
        try:
            numbers[str(group.group_desc or group.group_name)[:60]] = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):  # not every backend counts, and none before its first collective
            continue
    return numbers


def _write_flight_record(target: Path) -> None:
    data = _flight_recorder()
    if not data or len(data) > MAX_DUMP_BYTES:
        return
    temporary = target.with_name(f".{target.name}.tmp")
    with os.fdopen(open_append(temporary), "wb") as file:
        file.truncate()
        file.write(data)
    temporary.replace(target)


def _flight_recorder() -> bytes | None:
    """Return torch's flight record: that of NCCL if there is one, else that of Gloo (torch 2.8 and later)."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            record = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        except (RuntimeError, TypeError):
            continue
        if record and b"collective_seq_id" in record:
            return record
    return None
