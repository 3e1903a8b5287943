"""Peak memory of training above what the process had before the model was built: of this process, or watched ranks."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import count_peak_anew, resident_bytes

EVERY_S = 0.01
_before = 0


def model_begins() -> None:
    """Remember the resident memory, and let the kernel count the peak from here."""
    global _before
    count_peak_anew()
    _before, _ = resident_bytes("self")


def grown_bytes() -> int:
    """Return by how much the peak exceeds what `model_begins` saw."""
    return resident_bytes("self")[1] - _before


class RankWatch:
    """Samples the resident memory of the ranks of a run from outside until a rank begins to build its model.

    Nothing is sampled in steps. Use as a context manager around a run that writes into ``runs``; then `grown_bytes`.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._samples: dict[int, list[tuple[float, int]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S) and not self._builds():
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    self._sample(int(entry.name))

    def _builds(self) -> bool:
        return any(_build_time(path) is not None for path in self._runs.glob("*/events/rank0.jsonl"))

    def _sample(self, pid: int) -> None:
        try:
            if pid not in self._samples and b"allranks" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return
            self._samples.setdefault(pid, []).append((time.time(), resident_bytes(pid)[0]))
        except OSError:
            return

    def grown_bytes(self, events: Path) -> int | None:
        """Return by how much a rank's peak exceeds its memory when it began to build, by its events; None: unseen."""
        lines = _whole_lines(events)
        pid, began = next(e["pid"] for e in lines if e["event"] == "start"), _build_time(events)
        peak = max((e["peak_memory_bytes"] for e in lines if e["event"] == "step"), default=0)
        before = [n for at, n in self._samples.get(pid, []) if began is not None and at <= began]
        return peak - before[-1] if before and peak else None


def _whole_lines(events: Path) -> list[dict[str, Any]]:
    """Return the events of a rank that may be writing: the last line counts when it has ended."""
    return [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _build_time(events: Path) -> float | None:
    """Return when a rank began to build its model; None: it has not."""
    found = (e["time"] for e in _whole_lines(events) if e["event"] == "phase" and e["name"] == "build")
    return next(found, None)
