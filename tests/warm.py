"""Processes forked from one that has imported what they need: verbs of allranks, whole runs, and the ranks of
distributed tests.

Importing torch and transformers takes longer than most tests do. In a run that is started here, the launcher forks its
agent and the agent forks its ranks where they would otherwise start a Python (`fork_instead`): parents and children,
sessions, arguments and variables in /proc are the same, and each has modules of allranks that no other uses. What only
a new interpreter shows is left to tests that start one. ``python -m tests.warm KIND FD`` serves all workers of a
session.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import io
import logging
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from inspect import signature
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml

from tests.forks import WORKER

REPO = Path(__file__).resolve().parent.parent
ANEW = "ALLRANKS_TEST_ANEW"
PYTHONPATH = os.environ.get("PYTHONPATH", "")  # without what a test may add
HEAVY = (
    "torch", "torch.distributed.fsdp", "torch.distributed.optim", "transformers",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.bert.modeling_bert", "transformers.models.glm4_moe.modeling_glm4_moe", "transformers.trainer",
    "peft", "accelerate", "datasets",
)  # fmt: skip
DEEPSPEED = (
    "deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "distutils.ccompiler",
)  # fmt: skip
"""With what it imports when an engine is made."""


def import_light() -> None:
    """What verbs import, without torch, which they must do without."""
    source = REPO / "src"
    for path in sorted(source.glob("allranks/**/*.py")):
        name = path.relative_to(source).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        if not name.startswith(("allranks.train", "allranks.examples", "allranks.__main__")):
            module = import_module(name)
            for value in vars(module).values():
                if hasattr(value, "cache_info") and not signature(value).parameters:
                    value()  # templates, tables and patterns that many verbs read
    assert "torch" not in sys.modules


def import_heavy() -> None:
    import_light()
    for name in HEAVY:
        import_module(name)
    for name in DEEPSPEED:
        with suppress(ImportError):
            import_module(name)
    with suppress(ImportError, AttributeError):  # the patterns of all architectures' names, which PEFT asks for
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    for name in ("cases", "saves", "loads"):
        import_module(f"tests.dist.{name}")
    _import_copies()


def verb() -> None:
    from allranks.cli.main import main

    try:
        main()
    finally:  # as the interpreter does at its end
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run() -> None:
    """A verb whose processes are forked."""
    subprocess.Popen._execute_child = fork_instead  # type: ignore[attr-defined]
    _customize()
    verb()


def rank() -> None:
    """Arguments: a module of tests.dist and the words for its ``main``."""
    module = import_module(f"tests.dist.{sys.argv[0]}")
    module.main(vars(module))


KINDS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "light": (import_light, ()),
    "light without rights": (import_light, ("setpriv", "--inh-caps=-all", "--bounding-set=-all")),  # of root
    "heavy": (import_heavy, ()),
}
"""What a process imports, and the program that starts it."""
COPIES: list[dict[str, ModuleType]] = []
"""Modules of allranks that no process has used since they were imported: a forked one takes a copy, its parent does
not notice."""
_used: list[dict[str, ModuleType]] = []
CALLS: dict[str, Callable[[], None]] = {"verb": verb, "run": run, "rank": rank}


class Forked:
    """A process that was forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, warm: Warm, argv: list[str]) -> None:
        self.args, self._warm, self.pid = argv, warm, 0
        self.returncode: int | None = None

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._warm.listen(max(0.01, min(0.5, end - time.monotonic())))
        return self.returncode or 0

    def poll(self) -> int | None:
        self._warm.listen(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The connection of this worker to the process that forks others; one of each kind."""

    _all: dict[str, Warm] = {}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        self._lock = threading.RLock()
        self._processes: dict[int, Forked] = {}
        session = os.getppid() if WORKER in os.environ else os.getpid()
        path = f"{tempfile.gettempdir()}/allranks-warm-{session}-{kind.replace(' ', '-')}"
        with Path(f"{path}.lock").open("w") as lock, socket.socket(socket.AF_UNIX) as link:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                link.connect(path)
            except OSError:
                self._start(kind, path)
                link.connect(path)
            self._link = Connection(link.detach())

    def _start(self, kind: str, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            places = [str(REPO), str(REPO / "src"), PYTHONPATH]
            # room for the arguments and variables of what is forked, see `show_in_proc`
            env = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_TEST_ROOM": " " * 20000}
            env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
            command = [sys.executable, "-m", "tests.warm", kind, str(listener.fileno()), " " * 2000]
            subprocess.Popen(
                [*KINDS[kind][1], *command], env=env, cwd=REPO, stdin=subprocess.DEVNULL, stdout=2,
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip

    @classmethod
    def get(cls, kind: str) -> Warm:
        if kind not in cls._all:
            cls._all[kind] = cls(kind)
        return cls._all[kind]

    def listen(self, seconds: float) -> None:
        """Take the answers that come within this time; return after the first."""
        with self._lock:
            while self._link.poll(max(seconds, 0.0)):
                pid, code = self._link.recv()  # an EOFError: the process that forks others has died
                if code is None:
                    self._processes[pid], self._next.pid = self._next, pid
                else:
                    self._processes.pop(pid).returncode = code
                seconds = 0

    def start(
        self,
        call: str,
        argv: list[str],
        env: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        source: Path | str = os.devnull,
        cwd: Path | str = REPO,
        session: bool = False,
    ) -> Forked:
        """Start a process.

        Args:
            call: one of `CALLS`.
            output: takes what it prints; also its errors, unless they have a file of their own.
            source: its standard input.
            session: whether it leads a session.
        """
        files = (str(source), str(output), str(errors or output))
        with self._lock:
            made, end = Forked(self, argv), time.monotonic() + 280
            self._next = made
            self._link.send((call, argv, dict(env), str(cwd), session, files))
            while not made.pid:
                assert time.monotonic() < end, "nothing was forked in time"
                self.listen(1)
        return made


def start_verb(
    words: Sequence[str],
    output: Path,
    *,
    kind: str = "heavy",
    anew: bool = False,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> Forked | subprocess.Popen[bytes]:
    """Start ``allranks WORDS``.

    Args:
        kind: ``heavy`` for verbs that start runs or need torch.
        anew: start a new interpreter, and let the verb do so; the variable ALLRANKS_TEST_ANEW does it for all verbs.
        env: variables beside those of the test.
        more: of `Warm.start`.
    """
    env = {**os.environ, **(env or {})}
    if not anew and ANEW not in os.environ:
        return Warm.get(kind).start("run" if kind == "heavy" else "verb", ["allranks", *words], env, output, **more)
    errors = more.get("errors")
    with Path(more.get("source", os.devnull)).open("rb") as stdin, output.open("wb") as out, ExitStack() as stack:
        err = stack.enter_context(errors.open("wb")) if errors else subprocess.STDOUT
        streams = {"stdin": stdin, "stdout": out, "stderr": err}
        command = [sys.executable, "-m", "allranks.cli.main", *words]
        place = {"cwd": more.get("cwd"), "start_new_session": more.get("session", False)}
        return subprocess.Popen(command, env=env, **place, **streams)


def allranks(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    timeout_s: float = 60,
    kind: str = "light",
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, as `subprocess.run` does. See `start_verb`.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    argv = [*map(str, words)]
    with tempfile.TemporaryDirectory(prefix="allranks-verb-") as made:
        source, output, errors = (Path(made, name) for name in ("in", "out", "err"))
        source.write_bytes(stdin if isinstance(stdin, bytes) else stdin.encode())
        place = Path(cwd or ".").absolute()
        process = start_verb(argv, output, kind=kind, anew=anew, env=env, errors=errors, source=source, cwd=place)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            process.wait(20)
            raise subprocess.TimeoutExpired(argv, timeout_s, output.read_bytes(), errors.read_bytes()) from late
        return subprocess.CompletedProcess(argv, code, output.read_text(), errors.read_text())


def main() -> None:
    KINDS[sys.argv[1]][0]()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serve(socket.socket(fileno=int(sys.argv[2])), wake)


def serve(listener: socket.socket, wake: int) -> None:
    """Fork at requests; answer with the process's id, and its exit status when it has ended; end without workers."""
    workers: list[Connection] = []
    alive: dict[int, Connection] = {}
    while True:
        for ready in wait([listener, wake, *workers]):
            if isinstance(ready, int):
                os.read(wake, 4096)
                reap(alive)
            elif isinstance(ready, socket.socket):
                workers.append(Connection(listener.accept()[0].detach()))
            else:
                worker: Any = ready
                try:
                    pid = fork(*worker.recv())
                except (EOFError, ConnectionResetError):
                    for pid in [pid for pid, own in alive.items() if own is worker]:
                        os.kill(pid, signal.SIGKILL)
                    workers.remove(worker)
                    worker.close()
                    if not workers:
                        Path(listener.getsockname()).unlink(missing_ok=True)
                        return
                else:
                    alive[pid] = worker
                    tell(worker, pid, None)


def reap(alive: dict[int, Connection]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        tell(alive.pop(pid), pid, os.waitstatus_to_exitcode(status))


def tell(worker: Connection, pid: int, code: int | None) -> None:
    with suppress(OSError):  # it has gone
        worker.send((pid, code))


def fork(call: str, argv: list[str], env: dict[str, str], cwd: str, session: bool, files: tuple[str, str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        source, output = os.open(files[0], os.O_RDONLY), os.open(files[1], flags, 0o644)
        errors = output if files[2] == files[1] else os.open(files[2], flags, 0o644)
    except OSError:  # who asked has given up; without this the child would end as the server does
        os._exit(1)
    if session:
        os.setsid()
    end_with(CALLS[call], argv, env, cwd, (source, output, errors))


def end_with(
    call: Callable,
    argv: list[str],
    env: Mapping[str, str],
    cwd: str,
    files: tuple[int, int, int],
    keep: tuple[int, ...] = (),
) -> NoReturn:
    """Turn a process that was just forked into one that seems to have been started anew, call the function, and end."""
    code = 1
    try:
        _forget_parent(files, keep)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv, sys.path[0] = list(argv), cwd
        sys.modules["__main__"] = ModuleType("__main__")
        show_in_proc([sys.executable, *argv], env)
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the edge of a forked process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


def _forget_parent(files: tuple[int, int, int], keep: tuple[int, ...]) -> None:
    gc.freeze()  # nothing of the parent is freed, which could close files of this process
    atexit._clear()
    faulthandler.disable()
    faulthandler.cancel_dump_traceback_later()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for at, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 3) if fd >= 0 else fd for fd in files]):
        if fd >= 0:
            os.dup2(fd, at)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in keep:
            with suppress(OSError):
                os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for at, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw: Any = io.FileIO(at, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, line_buffering=name == "stderr")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def show_in_proc(argv: list[str], env: Mapping[str, str]) -> None:
    """Write arguments and variables where the kernel reads them for /proc; what has no room is left out."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # begin and end of the arguments, begin and end of the environment
    variables = [f"{k}={v}" for k, v in env.items()]
    for low, high, texts in ((places[0], places[1], argv), (places[2], places[3], variables)):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: high - low - 1]
        ctypes.memmove(low, data.ljust(high - low, b"\0"), high - low)


FORKED = [f"allranks.{name}" for name in ("launch.agent", "launch.rank", "cli.main")]
FORKED += [f"allranks.train.{name}" for name in ("generate", "export", "inspection")]
_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def fork_instead(
    self: Any, args: Any, executable: Any, preexec: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
) -> None:
    """In place of `subprocess.Popen._execute_child`: fork where a program of allranks would be started anew."""
    _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, new_session, _ = more
    words = [word for word in args if word != "-u"] if isinstance(args, list) else []
    server = len(words) > 1 and words[0] == sys.executable and words[1].endswith("/allranks/launch/store_server.py")
    module = words[2] if words[:2] == [sys.executable, "-m"] and words[2] in FORKED else ""
    program = _program_of(words) if module else None
    if not (server or module) or (program is not None and _sees_imports(program)):
        _execute_child(self, args, executable, preexec, close_fds, pass_fds, cwd, env, *more)
        return
    self.pid = os.fork()
    if not self.pid:
        if new_session:
            os.setsid()

        def call() -> None:
            _renew_allranks()
            if program is not None:
                _forget_trainer()
            if "-u" in args:
                sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
            sys.orig_argv = words
            _customize()
            sys.argv = words[1:] if server else words[2:]
            try:
                if server:
                    runpy.run_path(words[1], run_name="__main__")
                else:
                    sys.modules.pop(module, None)  # its code runs anew
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
            finally:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()

        env = dict(os.environ if env is None else env)
        if server:
            env[import_module("allranks.launch.store_server").WHOLE] = "1"  # it has been imported
        end_with(call, words[1:], env, str(cwd or Path.cwd()), (p2cread, c2pwrite, errwrite), tuple(pass_fds))
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _import_copies() -> None:
    """Import allranks again and again, for processes that a run forks from its own."""
    own = _take_allranks()
    for _ in range(2):  # an agent and its ranks
        for name in own:
            import_module(name)
        COPIES.append(_take_allranks())
    sys.modules.update(own)


def _renew_allranks() -> None:
    """Let its modules be as after their import, without what a parent has put into them."""
    _used.append(_take_allranks())  # to free them takes longer
    if COPIES:
        sys.modules.update(COPIES.pop())


def _take_allranks() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith("allranks.")}


def _program_of(words: list[str]) -> str | None:
    """The text of the program of a user that a rank runs."""
    spec = (Path(words[3]) / "spec.yaml").read_text() if words[2] == "allranks.launch.rank" else ""
    if not re.search(r"^script:$", spec, re.M):  # null
        return None
    path = Path(yaml.safe_load(spec)["script"].get("path") or "")
    return path.read_text() if path.is_file() else ""


def _sees_imports(program: str) -> bool:
    """Whether a program notices what has been imported: it does not import torch, or allranks notices when it imports
    a Trainer."""
    imports_torch = re.search(r"^\s*(import|from)\s.*\btorch\b", program, re.M)
    return not imports_torch or any(name in program for name in ("lightning", "deepspeed", "trl"))


def _forget_trainer() -> None:
    """Let the Trainer of transformers be imported anew."""
    sys.modules.pop("transformers.trainer", None)
    vars(sys.modules["transformers"]).pop("Trainer", None)


def _customize() -> None:
    """Run the module ``sitecustomize`` of the path that a test has set, as a new interpreter does."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import_module("sitecustomize")


if __name__ == "__main__":
    main()
