"""The user's own torchrun program (``script: {path, args}``), started as each rank's main program."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from allranks.facts import host_name
from allranks.hang.pulse import SCRIPT, pulse
from allranks.observe.events import EventLog
from allranks.rundir import RunDir
from allranks.spec.records import ScriptSpec


def run_script(run: RunDir, script: ScriptSpec, attempt: int) -> int:
    """Run it as ``python PATH ARGS`` would, with torchrun's environment.

    Returns:
        0; an exception or ``sys.exit`` of the program goes on to the caller.
    """
    rank = int(os.environ["RANK"])
    events = EventLog(run.events_of(rank), rank)
    world = int(os.environ["WORLD_SIZE"])
    events.write(
        "start",
        attempt=attempt,
        pid=os.getpid(),
        world_size=world,
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        resumed_from=None,
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to stop; the program may put its own handler here
    pulse.phase(SCRIPT)
    path = Path(script.path).expanduser().absolute()
    sys.argv = [str(path), *script.args]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    events.write("phase", name="done")
    pulse.phase("done")
    events.close()
    return 0
