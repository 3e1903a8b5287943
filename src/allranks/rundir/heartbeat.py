"""Heartbeat of a rank: a memory page that the rank writes and the agent of its node reads. Standard library only.

The agent creates the page and a file for stack dumps as anonymous files (``memfd``): they use no disk and disappear
with the processes. A rank opens them through the agent's ``/proc/PID/fd``.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import time
from collections.abc import Sequence

import msgspec

HEARTBEAT_VARIABLE = "ALLRANKS_PULSE"  # PAGE:STACKS of each local rank, separated by commas
STORE_VARIABLE = "ALLRANKS_STORE"
"""Names the store at which the ranks of a training exchange addresses: ``file:PATH`` or ``tcp:ADDRESS:PORT:PREFIX``."""
DUMP_SIGNAL = signal.SIGRTMIN + 7
"""The signal on which a rank writes the stacks of its threads."""
PAGE_SIZE = 1 << 16
_COUNT = struct.Struct("<qq")  # the same number twice; they differ while the rank writes
_BEAT = struct.Struct("<qdqdi20s20s")  # beats, when, step, longest gap, pid, phase, part (longer ones are cut)
_LIVE = struct.Struct("<dq")  # when the rank's own thread last ran, and how often it has run
_LENGTH = struct.Struct("<i")


class _Text(msgspec.Struct, frozen=True):
    """A place for a text on the page, after its length. A longer one is cut, a partly written one is read as it is."""

    at: int
    end: int

    def write(self, page: mmap.mmap, text: str) -> None:
        start = self.at + _LENGTH.size
        data = text.encode("utf-8", "replace")[: self.end - start]
        page[start : start + len(data)] = data
        _LENGTH.pack_into(page, self.at, len(data))

    def read(self, page: mmap.mmap) -> str:
        start = self.at + _LENGTH.size
        (length,) = _LENGTH.unpack_from(page, self.at)
        return _decoded(page[start : min(start + max(length, 0), self.end)])


_COUNT_AT, _BEAT_AT, _LIVE_AT, _ASKED_AT, _SAVE_AT = 0, 16, 512, 1024, 1025
_MONITOR_ERROR = _Text(528, 944)
_SEQUENCES = _Text(1028, 1 << 15)
_STACK = _Text(1 << 15, PAGE_SIZE - 4096)  # the innermost frames of the main thread
_FAILURE = _Text(PAGE_SIZE - 4096, PAGE_SIZE)  # the error with which the rank ends
_TRAINING = b"train"
NO_STEP = -1
TRAIN_PHASE = _TRAINING.decode()
SCRIPT_PHASE = "script"  # a user's own program, which reports no phases of its own
PREPARE_PHASE = "prepare"  # rows are read and tokenized, on the CPU
FIRST_STEP_PHASE = "first step"
FINISH_PHASE = "finish"  # the work is complete; loggers are closed and the ranks synchronise a last time
DONE_PHASE = "done"  # the last phase of a rank that exits cleanly, immediately before its process ends with code 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Last content of a rank's page. Times are from ``time.monotonic``, which all processes of a node share.

    ``longest_s`` is the longest time between two beats within training steps. ``alive_at`` is when the rank's heartbeat
    thread last ran and ``alive_beats`` how often it has run; 0 means never, which says nothing about the rank.
    ``monitor_error`` is the current failure of that thread, empty while it works. ``sequences`` holds the number of the
    last collective by group, and ``stack`` the innermost frames of the main thread (``file:function``), as that thread
    saw them. ``failure`` is the error with which the rank is about to exit, type and message; empty if there is none.
    """

    beats: int
    at: float
    step: int | None
    longest_s: float
    pid: int
    phase: str
    part: str
    alive_at: float
    sequences: dict[str, int]
    alive_beats: int = 0
    monitor_error: str = ""
    failure: str = ""
    stack: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Return whether the rank has reported a clean exit."""
        return self.phase == DONE_PHASE


class HeartbeatPage:
    """The agent's side of one rank's heartbeat."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("allranks-pulse")
        self.stacks = os.memfd_create("allranks-stacks")
        os.ftruncate(self.fd, PAGE_SIZE)
        self._map = mmap.mmap(self.fd, PAGE_SIZE)

    def read(self) -> Heartbeat | None:
        """Return the record of the rank, or None before its first heartbeat (or if it could not open the page)."""
        values = _BEAT.unpack_from(self._map, _BEAT_AT)
        for _ in range(100):  # if the rank was stopped while it wrote, the page is used unchanged
            before, after = _COUNT.unpack_from(self._map, _COUNT_AT)
            values = _BEAT.unpack_from(self._map, _BEAT_AT)
            if before == after == _COUNT.unpack_from(self._map, _COUNT_AT)[0]:
                break
        return self._beat(values) if values[0] else None

    def _beat(self, values: tuple[int, float, int, float, int, bytes, bytes]) -> Heartbeat:
        beats, at, step, longest, pid, phase, part = values
        alive_at, lives = _LIVE.unpack_from(self._map, _LIVE_AT)
        try:
            sequences = json.loads(_SEQUENCES.read(self._map) or "{}")
        except ValueError:  # partly written
            sequences = {}
        return Heartbeat(
            beats=beats,
            at=at,
            step=None if step == NO_STEP else step,
            longest_s=longest,
            pid=pid,
            phase=_decoded(phase),
            part=_decoded(part),
            alive_at=alive_at,
            sequences=sequences,
            alive_beats=lives,
            monitor_error=_MONITOR_ERROR.read(self._map),
            failure=_FAILURE.read(self._map),
            stack=tuple(_STACK.read(self._map).splitlines()),
        )

    def ask(self) -> None:
        """Request a flight recorder dump from the rank."""
        self._map[_ASKED_AT] = 1

    def request_checkpoint(self) -> None:
        """Request a full checkpoint from the rank, which all ranks then save after the same step."""
        self._map[_SAVE_AT] = 1

    @property
    def answered(self) -> bool:
        """Return whether the rank has written the dump."""
        return self._map[_ASKED_AT] == 2

    def stack_text(self, most_bytes: int) -> str:
        """Return what faulthandler has written so far."""
        size = os.fstat(self.stacks).st_size
        return os.pread(self.stacks, min(size, most_bytes), 0).decode("utf-8", "replace")


def page_paths(pages: list[HeartbeatPage]) -> str:
    """Return the value of `VARIABLE` that the agent sets."""
    pid = os.getpid()
    return ",".join(f"/proc/{pid}/fd/{p.fd}:/proc/{pid}/fd/{p.stacks}" for p in pages)


class HeartbeatWriter:
    """The rank's side of the heartbeat. Each call is one small write to memory.

    Does nothing without a page, or in a process that the rank has forked: it shares the page, but is not the rank.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._beats, self._step, self._longest = 0, NO_STEP, 0.0
        self._phase, self._was, self._part, self._at = b"", b"", b"", time.monotonic()
        self._steps = 0
        self._pid = self._owner = os.getpid()
        self._lives = 0

    def open(self, page: str) -> None:
        """Open the page for writing.

        Raises:
            OSError: it cannot be opened.
        """
        fd = os.open(page, os.O_RDWR)
        self._map = mmap.mmap(fd, PAGE_SIZE)
        os.close(fd)
        self._pid = self._owner = os.getpid()

    def phase(self, name: str) -> None:
        """Report the beginning of a phase: ``start``, ``prepare``, ``build``, ``prove``, ``train``, ``evaluate``,
        ``save``, ``finish``, ``done``; or ``script``. The first training step is a separate phase, because it compiles
        kernels and fills caches."""
        self._phase = (FIRST_STEP_PHASE if name == TRAIN_PHASE and not self._steps else name).encode()
        self._part = b""
        self.beat()

    def step(self, number: int) -> None:
        """Report the beginning of an optimizer step; the first is 0."""
        self._step, self._part = number, b""
        self._steps += 1
        if self._steps == 2:
            self._phase = _TRAINING
        self.beat()

    def part(self, name: str) -> None:
        """Report the beginning of a part of a step."""
        self._part = name.encode()
        self.beat()

    def beat(self) -> None:
        """Report progress."""
        if self._map is None or os.getpid() != self._owner:
            return
        now = time.monotonic()
        if self._phase == self._was == _TRAINING:
            self._longest = max(self._longest, now - self._at)
        self._at, self._was = now, self._phase
        self._beats += 1
        count, whole = self._beats, (self._beats, now, self._step, self._longest, self._pid, self._phase, self._part)
        # write the count before and after: a reader in between sees different counts
        _COUNT.pack_into(self._map, _COUNT_AT, count, count - 1)
        _BEAT.pack_into(self._map, _BEAT_AT, *whole)
        _COUNT.pack_into(self._map, _COUNT_AT, count, count)

    def alive(self, sequences: dict[str, int], stack: Sequence[str] = ()) -> None:
        """Report that the heartbeat thread runs, with each group's last collective and the main thread's stack."""
        if self._map is None:
            return
        _SEQUENCES.write(self._map, json.dumps(sequences))
        _STACK.write(self._map, "\n".join(stack))
        self._lives += 1
        _LIVE.pack_into(self._map, _LIVE_AT, time.monotonic(), self._lives)

    def monitor_error(self, text: str) -> None:
        """Report a failure of the heartbeat thread, or (empty) its recovery."""
        if self._map is not None:
            _MONITOR_ERROR.write(self._map, text)

    def failure(self, text: str) -> None:
        """Report the error with which the rank exits. It reaches the agent even if no file can be written."""
        if self._map is not None and os.getpid() == self._owner:
            _FAILURE.write(self._map, text)

    @property
    def in_script(self) -> bool:
        """Return whether the rank runs a user's own program."""
        return self._phase == SCRIPT_PHASE.encode()

    @property
    def asked(self) -> bool:
        """Return whether the agent has requested a flight recorder dump."""
        return self._map is not None and self._map[_ASKED_AT] == 1

    def take_checkpoint_request(self) -> bool:
        """Return whether the agent has requested a checkpoint since the last call."""
        if self._map is None or not self._map[_SAVE_AT]:
            return False
        self._map[_SAVE_AT] = 0
        return True

    def answered(self) -> None:
        """Report that the dump has been written."""
        if self._map is not None:
            self._map[_ASKED_AT] = 2


def _decoded(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


# One per process: many parts of training report through it.
heartbeat = HeartbeatWriter()
