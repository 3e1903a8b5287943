"""A process that has imported what the cases need, and forks a rank of it at each request.

Importing torch, transformers, PEFT and DeepSpeed takes longer than most cases do. Each rank is a process of its own all
the same: its own memory, its own gloo, its own end; whole runs (`harness.train`) start theirs anew, as for a user.

``python -m tests.dist.warm`` reads one JSON object a line (module, argv, env, output) and answers with the rank's process id;
when a rank has ended, a line with its exit status follows.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import sys
import traceback
from importlib import import_module
from typing import Any, TextIO

PRELOADED = (
    "tests.dist.cases",
    "tests.dist.saves",
    "tests.dist.loads",
    "transformers.models.mistral.modeling_mistral",
    "peft",
    "accelerate",
)
OPTIONAL = ("deepspeed",)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    for name in PRELOADED:
        import_module(name)
    for name in OPTIONAL:
        try:
            import_module(name)
        except ImportError:
            continue
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serve(answers, wake)


def serve(answers: TextIO, wake: int) -> None:
    """Until standard input ends; ranks that still live then are killed."""
    alive: set[int] = set()
    select = selectors.DefaultSelector()
    select.register(0, selectors.EVENT_READ)
    select.register(wake, selectors.EVENT_READ)
    rest = b""
    while True:
        for key, _ in select.select():
            if key.fd == wake:
                os.read(wake, 4096)
                reap(alive, answers)
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                alive.add(born := start(json.loads(line)))
                tell(answers, pid=born)


def reap(alive: set[int], answers: TextIO) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        alive.discard(pid)
        tell(answers, ended=pid, code=os.waitstatus_to_exitcode(status))


def tell(answers: TextIO, **what: int) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def start(wanted: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become(wanted)
        module = import_module(f"tests.dist.{wanted['module']}")
        module.main(vars(module))
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of a forked rank
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(wanted: dict[str, Any]) -> None:
    """A process like one that was started for this rank."""
    import numpy as np

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(wanted["env"])
    output = os.open(wanted["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 4096)
    random.seed()
    np.random.seed()
    sys.argv = wanted["argv"]


if __name__ == "__main__":
    main()
