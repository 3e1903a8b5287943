"""Read the progress of a user's own program in the output of its rank 0: lines that well-known libraries and programs
print.

Read are: the dictionaries of the Hugging Face Trainer, bars of tqdm and Lightning, and lines with a step and a loss
(``step 5 loss 54.3``, ``iter 5: loss 4.1``, ``Epoch [1/3], Step [5/40], Loss: 4.1``). A bar gives the step only if it
is the Trainer's own, named ``Epoch N``, or shows a loss. Steps that start again with each epoch are
counted on. What a line does not say stays absent. The output may hold anything: lines of any length, escape sequences,
invalid UTF-8.
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
    r"^(?:(?P<label>[^|%]{0,80}?):? +)?(?P<percent>\d{1,3})%\|[^|]{0,400}\|"
    r" *(?P<done>\d{1,12})/(?P<total>\d{1,12}) \[(?P<rest>.{0,400})$"
)
_RICH = re.compile(
    r"^(?P<label>Epoch \d{1,9}(?:/\d{1,9})?) {1,4}[━╸╺ ]{1,200}"
    r" (?P<done>\d{1,12})/(?P<total>\d{1,12}) (?P<rest>.{0,400})$"
)
_EPOCH = re.compile(r"^Epoch (\d{1,9})(?:/\d{1,9})?$")
_SEPARATOR = r"[ \t:=#|\[(]{1,20}"
_STEP = re.compile(
    rf"(?<![\w-])(?:global[ _])?(?:step|iter|iteration){_SEPARATOR}"
    rf"(\d{{1,12}})(?: {{0,12}}/ {{0,12}}(\d{{1,12}}))?(?![\w.])",
    re.IGNORECASE,
)
_EPOCH_NAMED = re.compile(rf"(?<![\w-])epoch{_SEPARATOR}(\d{{1,9}})(?![\w.])", re.IGNORECASE)
_LOSS = re.compile(
    rf"(?<![\w-])(?:([a-z]{{1,20}})[ _/-])?loss(?:_step)?{_SEPARATOR}({_NUMBER})(?=[,;\]|)\s]|$)", re.IGNORECASE
)
_OF_TRAINING = ("", "train", "training", "step", "batch", "mean", "avg", "average", "running", "lm")
_HELD_OUT = ("val", "valid", "validation", "eval", "evaluation", "test", "dev")
_HELD_OUT_BAR = re.compile(rf"\b(?:{'|'.join(_HELD_OUT)})", re.IGNORECASE)
_NANOGPT_EVAL = re.compile(rf"^step (\d{{1,12}}): train loss {_NUMBER}, val loss ({_NUMBER})\s*$", re.IGNORECASE)


def _losses(text: str) -> dict[str, float]:
    """Return the first loss of training and of held-out data that a text names."""
    losses: dict[str, float] = {}
    for name, value in _LOSS.findall(text):
        key = "loss" if name.lower() in _OF_TRAINING else "eval_loss" if name.lower() in _HELD_OUT else ""
        if key:
            losses.setdefault(key, float(value))
    return losses


class _StepCount:
    """Count on where the steps of a program start again with each epoch."""

    def __init__(self) -> None:
        self.before = 0  # steps of earlier epochs
        self.epoch: int | None = None
        self._last: int | None = None  # as the program counts
        self._length = 0  # of the epoch, if the program names it
        self._interval = 1  # between the last two steps

    def add(self, done: int, total: int, epoch: int | None) -> int:
        """Return the step since the start."""
        if self._last is not None:
            epochs = 0 if epoch is None or self.epoch is None else max(epoch - self.epoch, 0)
            if done < self._last or (epochs and done == self._last):
                self.before += (self._length or max(self._last + self._interval - done, 0)) * max(epochs, 1)
            elif done > self._last:
                self._interval = done - self._last
        self._last, self._length, self.epoch = done, total, epoch
        return self.before + done


class LineReader:
    """Find progress in lines, in their order. `take` returns what has been found since its last call."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._earlier: list[dict[str, Any]] = []  # each with a loss
        self._trainer_logged = False  # since its last bar: the line that follows is its bar again
        self._trainer_total: int | None = None
        self._lines, self._bars = _StepCount(), _StepCount()
        self._from_zero = False  # Lightning counts epochs from 0

    def feed(self, line: str) -> None:
        """Read one line."""
        text = printable(line).strip()
        if match := _TRAINER.search(text):
            fields = {name: float(value) for name, value in _FIELD.findall(match[0])}
            self._trainer_logged = "loss" in fields
            if self._trainer_logged and "loss" not in self._found:
                self._found.pop("step", None)  # of the last bar; the one that follows has the step of this loss
            self._keep(**fields)
        elif match := _BAR.match(text) or _RICH.match(text):
            self._bar(match)
        elif match := _NANOGPT_EVAL.match(text):  # its train loss is an estimate of the evaluation
            self._keep(step=int(match[1]), eval_loss=float(match[2]))
        elif (match := _STEP.search(text)) and (losses := _losses(text)):
            self._line(int(match[1]), int(match[2] or 0), _EPOCH_NAMED.search(text), losses)

    def _line(self, done: int, total: int, epoch: re.Match[str] | None, losses: dict[str, float]) -> None:
        number = int(epoch[1]) if epoch else None
        step = self._lines.add(done, total, number) if "loss" in losses else self._lines.before + done
        self._keep(step=step, **({} if number is None else {"epoch": float(number)}), **losses)

    def _bar(self, match: re.Match[str]) -> None:
        label, done, total = match["label"] or "", int(match["done"]), int(match["total"])
        if not total or done > total or _HELD_OUT_BAR.search(label):
            return
        loss = {name: value for name, value in _losses(match["rest"]).items() if name == "loss"}
        if not label and self._trainer_logged:
            self._trainer_total, self._trainer_logged = total, False
        if epoch := _EPOCH.match(label):
            number = int(epoch[1])
            self._from_zero = self._from_zero or number == 0 or "v_num" in match["rest"]
            self._keep(epoch=float(number), step=(number - (not self._from_zero)) * total + done, **loss)
        elif not label and total == self._trainer_total:
            self._keep(step=done, total=total, **loss)
        elif loss:
            step = self._bars.add(done, total, None)
            self._keep(step=step, **({} if self._bars.before else {"total": total}), **loss)

    def _keep(self, **values: Any) -> None:
        """Add values to the current record. It ends with a second loss, or with another step than that of its loss."""
        known = self._found
        moved = "step" in known and values.get("step", known["step"]) != known["step"]
        if "loss" in known and ("loss" in values or moved):
            if len(self._earlier) < MAX_LOSSES:
                self._earlier.append(known)
            self._found = {}
        self._found |= values

    def take(self, *, last: bool = False) -> list[dict[str, Any]]:
        """Return what has been found since the last call, one record per loss; of very many losses the first ones and
        the last.

        A loss of the Trainer whose step has not been read yet is kept for the next call, except at the `last`.
        """
        records, self._earlier = self._earlier, []
        if last or not (self._trainer_logged and "loss" in self._found):
            records, self._found = [*records, self._found], {}
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
            if lines := self._lines.take(last=last):
                with EventLog(self._events_path, 0) as log:
                    for record in lines:
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
