"""Run the user's own torchrun program (``script: {path, args}``) as the main program of a rank."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from allranks.planning.rank_environment import SCRIPT_ARGS, script_arguments
from allranks.rundir.events import EventLog
from allranks.rundir.heartbeat import SCRIPT_PHASE, heartbeat
from allranks.rundir.paths import RunDir
from allranks.rundir.progress import reporter
from allranks.spec.records import ScriptSpec
from allranks.utils.machine import host_name


def run_user_script(run: RunDir, script: ScriptSpec, attempt: int) -> int:
    """Run the program like ``python PATH ARGS``, with torchrun's environment.

    Returns:
        0 if it ended normally, also by ``sys.exit()`` or ``sys.exit(0)``.

    Raises:
        SystemExit: with any other code or a text.
        BaseException: whatever the program raises.
    """
    rank, own = int(os.environ["RANK"]), os.getpid()
    events = EventLog(run.events_of(rank), rank)
    world = int(os.environ["WORLD_SIZE"])
    events.write(
        "start",
        attempt=attempt,
        pid=own,
        world_size=world,
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        resumed_from=None,
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # stop request; the program may install its own handler
    heartbeat.phase(SCRIPT_PHASE)
    reporter.open(events)
    path = Path(script.path).expanduser().absolute()
    arguments = script_arguments(script, dict(os.environ))
    os.environ.pop(SCRIPT_ARGS, None)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    by_exit = False
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        by_exit = True
    finally:
        reporter.close()
    if os.getpid() == own:  # not in a child process forked by the program
        if by_exit:
            events.write("exit", attempt=attempt, exit_code=0, message="")
        events.write("phase", name="done")
        events.close()
    return 0
