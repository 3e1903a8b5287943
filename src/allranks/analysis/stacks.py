"""Parse stack dumps and determine what a thread is doing. Pure.

The hang watch of a run, the message about a crashed rank and `allranks diagnose` use it. Frames are ``file:function``
texts, innermost first, where the line number does not matter.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar

from msgspec import Struct

Activity = Literal["collective", "checkpoint", "data", "other"]

MAX_FRAMES = 64
FILE_LINE = r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d{1,9})(?:,? in (?P<function>\S+))?'
"""A frame as faulthandler and tracebacks print it."""
THREAD_LINE = r"^\s*(?:Current thread|Thread) (?:0x)?[0-9A-Fa-f]+\b.*(?:active|idle|most recent call first|MainThread)"
"""The first line of a thread, as faulthandler and py-spy print it."""
_FILE_LINE = re.compile(FILE_LINE)
RANK_PREFIX = re.compile(r"^\[rank\d{1,9}\]:")  # torch's sys.excepthook writes it before each line of a traceback
_PY_SPY = re.compile(r"^\s+(?P<function>\S.*?) \((?P<path>[^()]+):(?P<line>\d+)\)$")
_THREAD_LINE = re.compile(THREAD_LINE)

_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARY = re.compile(
    r"site-packages|dist-packages|^<|(?:^|/)torch/|/lib/python3[^/]*/(?!site-packages)|^/usr/lib/python"
)
_ALLRANKS = re.compile(r"/allranks/(train|launch|rundir)/")
_WAIT_TIMER = re.compile(r"allranks/train/step_timers\.py$")  # wraps each wait; not informative
_RANK_ENTRY = re.compile(r"allranks/launch/rank\.py:")

_COLLECTIVE = re.compile(
    r"distributed/(distributed_c10d|c10d|_functional_collectives|nn/functional|algorithms|utils|rpc)"
    r"|torch/autograd/graph\.py.*_engine_run_backward"
    r"|:(barrier|monitored_barrier|all_?reduce\w*|_?all_?gather\w*|gather_object|reduce_scatter\w*|broadcast\w*|all_to_all\w*|wait_tensor)$"
    # not the wait for a thread, a process or a file; py-spy shortens the paths of the standard library
    r"|^(?!.*/lib/python3[^/]*/(?!site-packages/|dist-packages/))(?!.*/(torch/utils|torch/multiprocessing|psutil)/)"
    r"(?!(threading|subprocess|selectors|(asyncio|multiprocessing|concurrent)/[^:]*)\.py:).*:wait$"
)
_CALLED = re.compile(
    r"distributed/distributed_c10d\.py:(barrier|monitored_barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*"
    r"|all_to_all\w*|gather\w*|scatter\w*|reduce)$"  # not send and recv: ranks of a pipeline are in different ones
)
_DEVICE_WAIT = re.compile(r":synchronize$")
_BUILD_LOCK = re.compile(r"torch/utils/file_baton\.py:wait$")
_CHECKPOINT = re.compile(
    r"(?<!torch/utils/)checkpoint|state_dict|save_pretrained|consolidat|full_params|_save_|:(save|torch_save)\w*$|serialization\.py|safetensors",
    re.IGNORECASE,
)
_DATA = re.compile(
    r"utils/data/|/data/|data_?loader|:(_next_data|_try_get_data|_get_data|__next__|__getitem__|make_batch)$"
    r"|multiprocessing/(queues|connection|pool)|:?queue\.py",
    re.IGNORECASE,
)
_BACKGROUND = re.compile(
    r"_pin_memory_loop|tqdm/_monitor|_monitor\.py|concurrent/futures|_watchdog|heartbeat|prefetch", re.IGNORECASE
)
COLLECTIVE_FRAMES = 10
"""Number of innermost frames in which a collective counts: further out, it may be a wrapper that has left it."""
ACTIVITY_FRAMES = 14
"""Number of innermost frames that show what a thread is doing."""


class StackFrame(Struct, frozen=True, kw_only=True):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


def is_library_file(path: str) -> bool:
    """Return whether a file belongs to Python or an installed package."""
    return path.startswith(_STDLIB) or bool(_LIBRARY.search(path))


def main_thread_frames(text: str) -> list[StackFrame]:
    """Return the main thread's frames in a dump of faulthandler or py-spy, innermost first; empty without any."""
    threads: list[_Thread] = []
    for line in text.splitlines():
        if _THREAD_LINE.match(line):
            threads.append(_Thread(line, []))
            continue
        match = _FILE_LINE.match(line) or _PY_SPY.match(line)
        if match and _WAIT_TIMER.search(match["path"]):
            continue
        if match and threads and len(threads[-1].frames) < MAX_FRAMES:
            function = (match["function"] or "?").strip()
            threads[-1].frames.append(StackFrame(file=match["path"], line=int(match["line"]), function=function))
    threads_of_main = main_threads(threads)
    return threads_of_main[-1].frames if threads_of_main else []


def traceback_frames(text: str) -> list[StackFrame]:
    """Return the frames of a traceback, innermost first."""
    lines = (RANK_PREFIX.sub("", line) for line in text.splitlines())
    matches = [m for line in lines if (m := _FILE_LINE.match(line)) and m["function"]]
    return [StackFrame(file=m["path"], line=int(m["line"]), function=m["function"]) for m in reversed(matches)]


class Thread(Protocol):
    """A thread of a dump: its first line, and its frames, innermost first."""

    @property
    def head(self) -> str: ...
    @property
    def frames(self) -> Sequence[object]: ...


class _Thread(Struct):
    head: str
    frames: list[StackFrame]


T = TypeVar("T", bound=Thread)


def main_threads(threads: Iterable[T]) -> list[T]:
    """Return the main threads of one or more dumps, in their order."""
    known = [thread for thread in threads if thread.frames]
    named = [thread for thread in known if "MainThread" in thread.head]
    return (
        named or [thread for thread in known if _is_main(thread.frames)] or known[-1:]
    )  # faulthandler: the oldest last


def _is_main(frames: Iterable[object]) -> bool:
    return any(_RANK_ENTRY.search(text) or text.endswith(":<module>") for text in map(str, frames))


def blocking_location(frames: list[StackFrame]) -> str:
    """Return where a thread is: the program's innermost line, and the library call inside it."""
    if not frames:
        return ""
    own = next((f for f in frames if not is_library_file(f.file) and not _ALLRANKS.search(f.file)), None)
    own = own or next((f for f in frames if not is_library_file(f.file)), frames[0])
    text = f"{own.file}:{own.line} in {own.function}"
    inner = frames[0]
    return text if inner is own else f"{text} (within {inner.file}:{inner.line} {inner.function})"


def is_collective_stack(frames: Sequence[str]) -> bool:
    """Return whether a thread is in a collective, or in the rendezvous before one."""
    return any(_COLLECTIVE.search(frame) for frame in frames[:COLLECTIVE_FRAMES])


def called_collective(frames: Sequence[str]) -> str:
    """Return the function of torch.distributed that a thread has called and not left; empty if it is not in one."""
    calls = [match[1] for frame in frames[:COLLECTIVE_FRAMES] if (match := _CALLED.search(frame))]
    return calls[-1] if calls else ""  # the outermost: a barrier calls all_reduce


def is_build_lock_stack(frames: Sequence[str]) -> bool:
    """Return whether a thread waits for another process to build a C++ extension of torch."""
    return any(_BUILD_LOCK.search(frame) for frame in frames[:4])


def is_checkpoint_frame(frame: str) -> bool:
    """Return whether a frame writes, reads or gathers a checkpoint; not activation checkpointing."""
    return _CHECKPOINT.search(frame) is not None


def is_data_frame(frame: str) -> bool:
    """Return whether a frame loads data, or waits for a process that does."""
    return _DATA.search(frame) is not None


def foreground_frames(frames: Sequence[str]) -> list[str]:
    """Return the innermost frames that show what a thread is doing."""
    return [f for f in frames if not _BACKGROUND.search(f)][:ACTIVITY_FRAMES]


def thread_activity(frames: Sequence[str]) -> Activity:
    """Return what a thread is doing: in a checkpoint, a collective counts only if it is among the innermost frames."""
    near = foreground_frames(frames)
    saves = any(map(is_checkpoint_frame, near))
    if any(_COLLECTIVE.search(f) or _DEVICE_WAIT.search(f) for f in (near[:6] if saves else near)):
        return "collective"
    if saves:
        return "checkpoint"
    return "data" if any(map(is_data_frame, near)) else "other"
