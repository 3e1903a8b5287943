"""Read the progress of a user's own program in the output of its rank 0: lines that well-known libraries and programs print.

Read are: the dictionaries of the Hugging Face Trainer, bars of tqdm, the progress lines of Lightning, and the lines of nanoGPT. A bar
gives the step only if it is that of a training: the Trainer's own, one named ``Epoch N`` or one that shows a loss. What a line does
not say stays absent. The output may hold anything: lines of any length, escape sequences, invalid UTF-8.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from pathlib import Path
from typing import Any

from allranks.rundir.events import PROGRESS, READ_IN_LOG, WRITE_INTERVAL_S, EventLog
from allranks.utils.inputs import read_appended
from allranks.utils.text import printable

LINE_BYTES = 4096  # longer lines are skipped
CHUNK_BYTES = 256 << 10  # read at most at once; what a program writes faster is skipped up to the newest
MAX_LOSSES = 20  # recorded at most at once
_NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf)"
_TRAINER = re.compile(r"\{'(?:loss|eval_loss|train_runtime|train_loss)': .{1,2000}\}")
_FIELD = re.compile(rf"'(loss|eval_loss|epoch)': '?({_NUMBER})'?[,}}]", re.IGNORECASE)
_BAR = re.compile(
    r"^(?:(?P<label>[^|%]{0,80}?):? +)?(?P<percent>\d{1,3})%\|[^|]{0,400}\| *(?P<done>\d{1,12})/(?P<total>\d{1,12}) \[(?P<rest>.{0,400})$"
)
_RICH = re.compile(
    r"^(?P<label>Epoch \d{1,9}(?:/\d{1,9})?) {1,4}[━╸╺ ]{1,200} (?P<done>\d{1,12})/(?P<total>\d{1,12}) (?P<rest>.{0,400})$"
)
_EPOCH = re.compile(r"^Epoch (\d{1,9})(?:/\d{1,9})?$")
_LOSS = re.compile(rf"(?:^|[ ,])(?:train_)?loss(?:_step)?(?:=|: )({_NUMBER})(?=[,\]\s]|$)", re.IGNORECASE)
_NANOGPT = re.compile(rf"^iter (\d{{1,12}}): loss ({_NUMBER})(?=[,\s]|$)", re.IGNORECASE)
_NANOGPT_EVAL = re.compile(rf"^step (\d{{1,12}}): train loss {_NUMBER}, val loss ({_NUMBER})\s*$", re.IGNORECASE)


class LineReader:
    """Find progress in lines, in their order. `take` returns what has been found since its last call."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._earlier: list[dict[str, Any]] = []  # each with a loss
        self._trainer_logged = False  # since its last bar: the line that follows is its bar again
        self._trainer_total: int | None = None
        self._epoch: tuple[int, int] | None = None  # number and length of the current one
        self._before = 0  # steps of earlier epochs

    def feed(self, line: str) -> None:
        """Read one line."""
        text = printable(line).strip()
        if text.startswith("iter "):
            if match := _NANOGPT.match(text):
                self._keep(step=int(match[1]), loss=float(match[2]))
        elif text.startswith("step "):
            if match := _NANOGPT_EVAL.match(text):
                self._keep(step=int(match[1]), eval_loss=float(match[2]))
        elif match := _TRAINER.search(text):
            found = {name: float(value) for name, value in _FIELD.findall(match[0])}
            self._trainer_logged = "loss" in found
            self._keep(**found)
        elif match := (_BAR.match(text) or _RICH.match(text)):
            self._bar(match["label"] or "", int(match["done"]), int(match["total"]), match["rest"])

    def _bar(self, label: str, done: int, total: int, rest: str) -> None:
        loss = _LOSS.search(rest)
        epoch = _EPOCH.match(label)
        if not total or done > total:
            return
        if epoch:
            number = int(epoch[1])
            if self._epoch is not None and number > self._epoch[0]:
                self._before += self._epoch[1]
            self._epoch = number, total
            self._keep(step=self._before + done, epoch=float(number))
        elif not label and self._trainer_logged:
            self._trainer_total, self._trainer_logged = total, False
        if not epoch and (loss or (not label and total == self._trainer_total)):
            self._keep(step=done, total=total)
        if loss:
            self._keep(loss=float(loss[1]))

    def _keep(self, **values: Any) -> None:
        if "loss" in values and "loss" in self._found:
            if len(self._earlier) < MAX_LOSSES:
                self._earlier.append(self._found)
            self._found = {}
        self._found |= values

    def take(self) -> list[dict[str, Any]]:
        """Return what has been found since the last call, one record per loss; of very many losses the first ones and the last."""
        records, self._earlier, self._found = [*self._earlier, self._found], [], {}
        return [
            {name: value if math.isfinite(value) else None for name, value in record.items()}
            for record in records
            if record
        ]


class LogProgress(threading.Thread):
    """Follow the log of rank 0 until `stop`, and write its progress as events of rank 0.

    Args:
        log: the log, which need not exist yet.
        events: the events of rank 0.
    """

    def __init__(self, log: Path, events: Path) -> None:
        super().__init__(name="progress", daemon=True)
        self._log, self._events_path = log, events
        self._offset, self._rest, self._skips = 0, b"", False
        self._lines = LineReader()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(WRITE_INTERVAL_S):
            self.look()
        self.look(last=True)

    def stop(self) -> None:
        """Read the end of the log, and stop."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=5.0)

    def look(self, *, last: bool = False) -> None:
        """Read new lines, at the end also an incomplete one. Failures are only logged."""
        try:
            for line in self._new_lines():
                self._lines.feed(line)
            if last:
                self._lines.feed(self._rest.decode("utf-8", "replace"))
            if found := self._lines.take():
                with EventLog(self._events_path, 0) as log:
                    for record in found:
                        log.write(PROGRESS, source=READ_IN_LOG, **record)
        except Exception as error:  # noqa: BLE001 - the output may hold anything, and the run does not depend on it
            logging.warning("no progress can be read in %s: %s: %s", self._log, type(error).__name__, error)

    def _new_lines(self) -> list[str]:
        try:
            data, skipped = read_appended(self._log, self._offset, CHUNK_BYTES)
        except OSError:
            return []
        if skipped:
            self._rest, self._skips = b"", True
        self._offset += skipped + len(data)
        lines = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        if self._skips and lines:
            lines, self._skips = lines[1:], False
        if len(self._rest) > LINE_BYTES:
            self._rest, self._skips = b"", True
        return [line.decode("utf-8", "replace") for line in lines if 0 < len(line) <= LINE_BYTES]
