"""Show what a user's own program prints and reports while ``allranks run`` follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.rundir.paths import RunDir
from allranks.rundir.progress import REPORTED
from allranks.utils.formatting import finite_float, finite_int
from allranks.utils.inputs import read_appended

LOOK_S = 0.3
CHUNK_BYTES = 64 << 10  # shown at most of one log per look; what comes faster is left out, and said
LINE_BYTES = 4000
NO_OUTPUT = "none"
OUTPUTS = ("rank0", "all", NO_OUTPUT)


class ProgramProgress:
    """Combine the events ``progress`` of all ranks. Those read in the output are ignored once the program reports."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self._loss = ""
        self._reports = False
        self._speeds: dict[int, float] = {}  # tokens per second by rank
        self._last: dict[int, float] = {}
        self._step_at: tuple[int, float] | None = None
        self._steps_per_s: float | None = None

    def take(self, event: dict[str, Any]) -> dict[str, str] | None:
        """Return the texts ``step``, ``loss`` and ``speed``; None if the event is ignored."""
        reported = event.get("source") == REPORTED
        if self._reports and not reported:
            return None
        if reported and not self._reports:
            self.__init__()
            self._reports = True
        rank, at = finite_int(event.get("rank")), finite_float(event.get("last", event.get("time")))
        if rank is None or at is None:
            return None
        tokens, passed_s = finite_int(event.get("tokens")), at - self._last.get(rank, at)
        if tokens is not None and passed_s > 0:
            self._speeds[rank] = tokens / passed_s
        self._last[rank] = at
        if rank == 0:
            self._take_first_rank(event, at)
        note = "" if reported else " (log)"
        shown = f"step {self.step}" + (f"/{self.total}" if self.total else "") + note if self.step is not None else ""
        return {"step": shown, "loss": self._loss, "speed": self._speed()}

    def _take_first_rank(self, event: dict[str, Any], at: float) -> None:
        step = finite_int(event.get("step"))
        if step is not None:
            if self._step_at is not None and at > self._step_at[1] and step > self._step_at[0]:
                self._steps_per_s = (step - self._step_at[0]) / (at - self._step_at[1])
            self._step_at, self.step = (step, at), step
        self.total = finite_int(event.get("total")) or self.total
        if "loss" in event:
            loss = finite_float(event["loss"])
            self._loss = f"loss {'nan' if loss is None else format(loss, '.4f')}"

    def _speed(self) -> str:
        if self._speeds:
            return f"{sum(self._speeds.values()):,.0f} tokens/s"
        return "" if self._steps_per_s is None else f"{self._steps_per_s:.3g} steps/s"


class ProgramOutput(threading.Thread):
    """Show new lines of the ranks' logs until the block ends; as a context manager around the run.

    Escape sequences and secrets are removed. Of a line that a program overwrites (carriage returns, as progress bars do) the last state is shown.

    Args:
        show: prints a line.
        which: ``rank0`` or ``all``.
    """

    def __init__(self, run: RunDir, show: Callable[[str], object], which: str) -> None:
        super().__init__(name="output", daemon=True)
        self._run, self._show, self._which = run, show, which
        self._offsets: dict[Path, int] = {path: path.stat().st_size for path in self._logs().values()}
        self._rests: dict[Path, bytes] = {}
        self._stopped = threading.Event()
        self._failed = False

    def __enter__(self) -> ProgramOutput:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join(timeout=10.0)
        self._look(last=True)

    def run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _logs(self) -> dict[int, Path]:
        attempts = self._run.attempts()
        logs = self._run.rank_logs(attempts[-1]) if attempts else {}
        return {rank: path for rank, path in logs.items() if self._which == "all" or rank == 0}

    def _look(self, *, last: bool = False) -> None:
        """Show what is new. A display never ends a run."""
        if self._failed:
            return
        try:
            for rank, path in self._logs().items():
                for line in self._new_lines(path, last=last):
                    self._show(f"[rank {rank}] {line}" if self._which == "all" else line)
        except Exception:  # noqa: BLE001 - a closed terminal, a damaged folder
            self._failed = True

    def _new_lines(self, path: Path, *, last: bool) -> list[str]:
        from allranks.utils.redaction import redact
        from allranks.utils.text import printable

        try:
            data, skipped = read_appended(path, self._offsets.get(path, 0), CHUNK_BYTES)
        except OSError:
            return []
        self._offsets[path] = self._offsets.get(path, 0) + skipped + len(data)
        before = b"" if skipped else self._rests.get(path, b"")
        *whole, rest = (before + data).split(b"\n")
        if skipped:
            whole = whole[1:]
        if last:
            whole, rest = [*whole, rest], b""
        self._rests[path] = rest[-LINE_BYTES:]
        lines = [printable(_visible(line).decode("utf-8", "replace")).rstrip() for line in whole]
        shown = redact("\n".join(line for line in lines if line)).split("\n") if any(lines) else []
        return [f"... {skipped:,} bytes are not shown; the log has all: {path}", *shown] if skipped else shown


def _visible(line: bytes) -> bytes:
    """Return what a terminal would show of a line at its end, shortened."""
    states = [part for part in line[-4 * LINE_BYTES :].split(b"\r") if part.strip()]
    return states[-1][:LINE_BYTES] if states else b""
