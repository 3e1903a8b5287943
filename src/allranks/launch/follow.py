"""Watches a job until it ends: hands on its events, and turns Ctrl-C and signals into an orderly end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from allranks.observe.events import Tail
from allranks.observe.stragglers import Stragglers

POLL_S = 0.1
INTERRUPT_GRACE_S = 3.0  # Ctrl-C: every rank is gone within 5 s
STOP_GRACE_S = 600.0  # TERM and USR1: as long as a step and a checkpoint may take


class Job(Protocol):
    """Something that runs ranks."""

    label: str

    def poll(self) -> int | None: ...

    def news(self) -> str | None: ...

    def ask_stop(self) -> None: ...

    def kill(self) -> None: ...

    def kill_agent(self) -> None: ...

    def end_reason(self) -> str: ...


class Observer(Protocol):
    """Shows a person what happens."""

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class Interrupts:
    """Counts what has been asked for by signals."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.stops = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.stops += 1


@contextmanager
def handling_signals() -> Iterator[Interrupts]:
    """INT, TERM and USR1 are counted within, and as before after. Outside the main thread nothing is changed."""
    counts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield counts
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, counts) for number in numbers}
    try:
        yield counts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(job: Job, tail: Tail, observer: Observer, counts: Interrupts) -> int:
    """Until the job has ended.

    Returns:
        Its exit code.
    """
    slow = Stragglers()
    deadline: float | None = None
    killed_at: float | None = None
    while (code := job.poll()) is None:
        _show(tail, observer, slow)
        news = job.news()
        if news:
            observer.say(news)
        now = time.monotonic()
        if deadline is None and (counts.interrupts or counts.stops):
            grace = INTERRUPT_GRACE_S if counts.interrupts else STOP_GRACE_S
            deadline = now + grace
            observer.say(
                "stopping: the ranks finish their step and write a checkpoint"
                + (f"; in {grace:.0f} s they are ended" if counts.interrupts else "")
            )
            job.ask_stop()
        elif deadline is not None and counts.interrupts and counts.stops and deadline - now > INTERRUPT_GRACE_S:
            deadline = now + INTERRUPT_GRACE_S
        if deadline is not None and killed_at is None and (now > deadline or counts.interrupts > 1):
            killed_at = now
            job.kill()
        if killed_at is not None and now > killed_at + 1.0:
            job.kill_agent()
        time.sleep(POLL_S)
    _show(tail, observer, slow)
    return code


def _show(tail: Tail, observer: Observer, slow: Stragglers) -> None:
    for event in tail.new():
        observer.event(event)
        for text in slow.take(event):
            observer.say(text)
