"""Processes forked from one that has imported what they need: verbs of allranks, and the ranks of distributed tests.

Importing takes longer than most of them do. Each is a process of its own all the same: its own memory, its own gloo, its own end. Only
/proc shows the command and variables of the process that forked it, so whole runs (`allranks run`) start theirs anew, as for a user.

``python -m tests.warm KIND`` reads one JSON object a line (see `Warm.start`) and answers with the process's id; when that has ended, a
line with its exit status follows.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

REPO = Path(__file__).resolve().parent.parent
RANKS = (
    "tests.dist.cases",
    "tests.dist.saves",
    "tests.dist.loads",
    "transformers.models.mistral.modeling_mistral",
    "peft",
    "accelerate",
)


def import_verbs() -> None:
    """Everything that verbs import, except torch, which they must do without."""
    source = REPO / "src"
    for path in sorted(source.glob("allranks/**/*.py")):
        name = path.relative_to(source).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        if not name.startswith(("allranks.train", "allranks.examples", "allranks.__main__")):
            import_module(name)
    assert "torch" not in sys.modules


def import_ranks() -> None:
    for name in RANKS:
        import_module(name)
    try:
        import_module("deepspeed")
    except ImportError:
        pass


def verb() -> None:
    from allranks.cli.main import main

    try:
        main()
    finally:  # as the interpreter does at its end
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def rank() -> None:
    """Arguments: a module of tests.dist and the words for its ``main``."""
    module = import_module(f"tests.dist.{sys.argv[0]}")
    module.main(vars(module))


WITHOUT_RIGHTS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")  # of root, who may read everything
KINDS: dict[str, tuple[Callable[[], None], Callable[[], None], tuple[str, ...]]] = {
    "verbs": (import_verbs, verb, ()),
    "verbs without rights": (import_verbs, verb, WITHOUT_RIGHTS),
    "ranks": (import_ranks, rank, ()),
}
"""Kind of process: what it imports, what those that it forks call, and how it is started."""


class Warm:
    """The process that forks others; one of each kind in a test session."""

    _all: dict[str, Warm] = {}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        path = [str(REPO), str(REPO / "src"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
        command = [*KINDS[kind][2], sys.executable, "-m", "tests.warm", kind]
        self._process = subprocess.Popen(
            command, env=env, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self._ended: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.kill)

    @classmethod
    def get(cls, kind: str) -> Warm:
        if kind not in cls._all or cls._all[kind]._process.poll() is not None:
            cls._all[kind] = cls(kind)
        return cls._all[kind]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"over": 1})

    def _next(self, deadline: float) -> dict[str, int]:
        try:
            answer = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("the processes did not end in time") from None
        assert "over" not in answer, "the process that forks others has died"
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["code"]
        return answer

    def start(
        self,
        deadline: float,
        argv: list[str],
        env: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        source: Path | str = os.devnull,
        cwd: Path | str = REPO,
    ) -> int:
        """Start a process.

        Args:
            output: takes what it prints; also its errors, unless they have a file of their own.
            source: its standard input.
        """
        assert self._process.stdin is not None
        files = {"output": str(output), "errors": str(errors or output), "source": str(source)}
        wanted = {"argv": argv, "env": dict(env), "cwd": str(cwd), **files}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        while "pid" not in (answer := self._next(deadline)):
            pass
        return answer["pid"]

    def wait(self, pids: list[int], deadline: float) -> list[int]:
        """The exit codes; processes that are late are killed."""
        try:
            while not set(pids) <= set(self._ended):
                self._next(deadline)
        except TimeoutError:
            for pid in set(pids) - set(self._ended):
                os.kill(pid, signal.SIGKILL)
            self.wait(pids, time.monotonic() + 20)
        return [self._ended.pop(pid) for pid in pids]


def allranks(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    timeout_s: float = 60,
    kind: str = "verbs",
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, as `subprocess.run` does.

    Args:
        env: variables beside those of the test.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    argv = ["allranks", *map(str, words)]
    with tempfile.TemporaryDirectory(prefix="allranks-verb-") as made:
        source, output, errors = (Path(made, name) for name in ("in", "out", "err"))
        source.write_bytes(stdin if isinstance(stdin, bytes) else stdin.encode())
        began, warm = time.monotonic(), Warm.get(kind)
        pid = warm.start(
            began + 60,
            argv,
            {**os.environ, **(env or {})},
            output,
            errors=errors,
            source=source,
            cwd=cwd or Path.cwd(),
        )
        (code,) = warm.wait([pid], time.monotonic() + timeout_s)
        if code == -signal.SIGKILL and time.monotonic() - began > timeout_s:
            raise subprocess.TimeoutExpired(argv, timeout_s, output.read_bytes(), errors.read_bytes())
        return subprocess.CompletedProcess(argv, code, output.read_text(), errors.read_text())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    load, call, _ = KINDS[sys.argv[1]]
    load()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serve(answers, wake, call)


def serve(answers: TextIO, wake: int, call: Callable[[], None]) -> None:
    """Until standard input ends; processes that still live then are killed."""
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
                alive.add(born := fork(json.loads(line), call))
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


def fork(wanted: dict[str, Any], call: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become(wanted)
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the edge of a forked process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(code)


def become(wanted: dict[str, Any]) -> None:
    """A process like one that was started anew."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(wanted["source"], os.O_RDONLY), 0)
    os.dup2(os.open(wanted["output"], flags, 0o644), 1)
    os.dup2(1 if wanted["errors"] == wanted["output"] else os.open(wanted["errors"], flags, 0o644), 2)
    os.closerange(3, 4096)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv, sys.path[0] = wanted["argv"], wanted["cwd"]
    sys.modules["__main__"] = ModuleType("__main__")


if __name__ == "__main__":
    main()
