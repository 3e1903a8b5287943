"""A rank's heartbeat: a page of memory that the rank writes and the agent of its node reads. Standard library only.

The agent makes the page and a file for stack dumps as files without a name (``memfd``): nothing lies on any disk, and
nothing is left behind, however a process ends. A rank opens them by the agent's ``/proc/PID/fd``.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time

import msgspec

VARIABLE = "ALLRANKS_PULSE"  # for each local rank PAGE:STACKS, by comma
SIZE = 1 << 16
_COUNT = struct.Struct("<qq")  # the same number twice; unlike while the rank writes
_BEAT = struct.Struct("<qdqdi20s20s")  # beats, when, step, longest gap, pid, phase, part (longer ones are cut)
_LIVE = struct.Struct("<di")  # when the rank's own thread last ran, and the length of the text that follows
_COUNT_AT, _BEAT_AT, _LIVE_AT, _ASKED_AT, _TEXT_AT = 0, 16, 512, 1024, 1032
_TRAINING = b"train"
NO_STEP = -1
TRAIN = _TRAINING.decode()
SCRIPT = "script"  # a program of the user's own: it says nothing of itself
FIRST_STEP = "first step"


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last said. Times are of ``time.monotonic``, which all processes of a node share.

    ``longest_s`` is the longest time between two beats within steps of training, ``alive_at`` when a thread of Python
    last ran in that process, ``sequences`` the number of the last collective by group.
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


class Page:
    """The agent's side of one rank."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("allranks-pulse")
        self.stacks = os.memfd_create("allranks-stacks")
        os.ftruncate(self.fd, SIZE)
        self._map = mmap.mmap(self.fd, SIZE)

    def read(self) -> Beat | None:
        """The rank's words, or None before the first."""
        values = _BEAT.unpack_from(self._map, _BEAT_AT)
        for _ in range(100):  # and if it was stopped while it wrote, as it is
            before, after = _COUNT.unpack_from(self._map, _COUNT_AT)
            values = _BEAT.unpack_from(self._map, _BEAT_AT)
            if before == after == _COUNT.unpack_from(self._map, _COUNT_AT)[0]:
                break
        return self._beat(values) if values[0] else None

    def _beat(self, values: tuple[int, float, int, float, int, bytes, bytes]) -> Beat:
        beats, at, step, longest, pid, phase, part = values
        alive_at, size = _LIVE.unpack_from(self._map, _LIVE_AT)
        try:
            found = json.loads(self._map[_TEXT_AT : _TEXT_AT + size]) if size > 0 else {}
        except ValueError:  # half written
            found = {}
        return Beat(
            beats=beats,
            at=at,
            step=None if step == NO_STEP else step,
            longest_s=longest,
            pid=pid,
            phase=_text(phase),
            part=_text(part),
            alive_at=alive_at,
            sequences=found,
        )

    def ask(self) -> None:
        """Ask the rank for its flight recorder."""
        self._map[_ASKED_AT] = 1

    @property
    def answered(self) -> bool:
        """Whether it has done so."""
        return self._map[_ASKED_AT] == 2

    def stack_text(self, most_bytes: int) -> str:
        """What faulthandler has written so far."""
        size = os.fstat(self.stacks).st_size
        return os.pread(self.stacks, min(size, most_bytes), 0).decode("utf-8", "replace")


def offered(pages: list[Page]) -> str:
    """What the agent puts into `VARIABLE`."""
    pid = os.getpid()
    return ",".join(f"/proc/{pid}/fd/{p.fd}:/proc/{pid}/fd/{p.stacks}" for p in pages)


class Pulse:
    """The rank's side. Each call is one small write to memory; without a page nothing happens."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._beats, self._step, self._longest = 0, NO_STEP, 0.0
        self._phase, self._was, self._part, self._at = b"", b"", b"", time.monotonic()
        self._steps = 0
        self._pid = os.getpid()

    def open(self, page: str) -> None:
        """From now on write to this page.

        Raises:
            OSError: it cannot be opened.
        """
        fd = os.open(page, os.O_RDWR)
        self._map = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._pid = os.getpid()

    def phase(self, name: str) -> None:
        """A phase of the run begins: ``start``, ``prepare``, ``build``, ``prove``, ``train``, ``evaluate``, ``save``, ``done``.
        Training begins with a first step, which compiles kernels and fills caches."""
        self._phase = (FIRST_STEP if name == TRAIN and not self._steps else name).encode()
        self._part = b""
        self.beat()

    def step(self, number: int) -> None:
        """An optimizer step begins; the first is 0."""
        self._step = number
        self._steps += 1
        if self._steps == 2:
            self._phase = _TRAINING
        self.beat()

    def part(self, name: str) -> None:
        """A part of a step begins."""
        self._part = name.encode()
        self.beat()

    def beat(self) -> None:
        """There is progress."""
        if self._map is None:
            return
        now = time.monotonic()
        if self._phase == self._was == _TRAINING:
            self._longest = max(self._longest, now - self._at)
        self._at, self._was = now, self._phase
        self._beats += 1
        count, whole = self._beats, (self._beats, now, self._step, self._longest, self._pid, self._phase, self._part)
        # the count before and after: a reader in between sees that they differ
        _COUNT.pack_into(self._map, _COUNT_AT, count, count - 1)
        _BEAT.pack_into(self._map, _BEAT_AT, *whole)
        _COUNT.pack_into(self._map, _COUNT_AT, count, count)

    def alive(self, sequences: dict[str, int]) -> None:
        """Said by a thread of its own: Python runs in this process, and its groups are at these collectives."""
        if self._map is None:
            return
        text = json.dumps(sequences).encode()[: SIZE - _TEXT_AT]
        self._map[_TEXT_AT : _TEXT_AT + len(text)] = text
        _LIVE.pack_into(self._map, _LIVE_AT, time.monotonic(), len(text))

    @property
    def asked(self) -> bool:
        """Whether the agent wants the flight recorder."""
        return self._map is not None and self._map[_ASKED_AT] == 1

    def answered(self) -> None:
        """It has been written."""
        if self._map is not None:
            self._map[_ASKED_AT] = 2

    @property
    def watched(self) -> bool:
        """Whether an agent looks on."""
        return self._map is not None


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


# One a process: what it is doing is a fact of the process, and what reports it is spread over all of training.
pulse = Pulse()
