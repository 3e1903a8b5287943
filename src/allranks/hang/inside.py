"""What a rank does for those who watch it: shows where it stands on a signal, and writes its flight recorder when asked.

A thread of its own says twice a second that Python runs, with the numbers of the last collectives. torch is used only
where the rank has imported it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from allranks.hang.pulse import VARIABLE, pulse
from allranks.rundir import RunDir

DUMP_SIGNAL = signal.SIGRTMIN + 7
LOOK_S = 0.5
MOST_BYTES = 8 << 20


def start(run: RunDir, attempt: int, rank: int) -> None:
    """Open what the agent offers. Without an agent that watches, nothing happens."""
    pages = os.environ.get(VARIABLE, "").split(",")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    page, _, stacks = (pages[local] if local < len(pages) else "").partition(":")
    if not page:
        return
    try:
        pulse.open(page)
        file = Path(stacks).open("ab", buffering=0)  # noqa: SIM115 - open as long as the process lives
    except OSError as error:  # the page lies in the agent's /proc: another user or container may not open it
        print(f"allranks: this rank is not watched for hangs: {error}", flush=True)  # noqa: T201 - the rank's log
        return
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    pulse.phase("start")
    target = run.hang_flight(attempt, rank)
    threading.Thread(target=_live, args=(target,), name="allranks-pulse", daemon=True).start()


def _live(target: Path) -> None:
    while True:
        pulse.alive(_sequences())
        if pulse.asked:
            _write(target)
            pulse.answered()
        time.sleep(LOOK_S)


def _sequences() -> dict[str, int]:
    """The number of the last collective of each group of this rank."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    found = {}
    for group in list(c10d._world.pg_map):
        try:
            found[str(group.group_desc or group.group_name)[:60]] = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):  # not every backend counts, and none before its first collective
            continue
    return found


def _write(target: Path) -> None:
    data = _flight_recorder()
    if not data or len(data) > MOST_BYTES:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError:
        return


def _flight_recorder() -> bytes | None:
    """torch's record of the last collectives: NCCL's where there is one, else that of gloo (torch 2.8 and later)."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d") or getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None
    )
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            found = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        except (RuntimeError, TypeError):
            continue
        if found and b"collective_seq_id" in found:
            return found
    return None
