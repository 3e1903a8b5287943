"""Let ranks agree on each phase of a save through a process group of their own; every wait has a time limit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from allranks.errors import CheckpointError
from allranks.utils.filesystem import low_space_text

T = TypeVar("T")


class RankAgreement:
    """Run actions on all ranks so that they succeed or fail together.

    Args:
        meet_timeout_s: how long ranks wait for all ranks to join a save.
        work_timeout_s: how long a rank may take to write its part.
        folder: the target folder, for messages about free space; None if nothing is written.
    """

    def __init__(self, meet_timeout_s: float, work_timeout_s: float, folder: Path | None = None) -> None:
        self.work_timeout_s, self._folder = work_timeout_s, folder
        self._meet_timeout = timedelta(seconds=meet_timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=work_timeout_s), group_desc="checkpoint")
        self.group = cast(dist.ProcessGroup, group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def meet(self, what: str) -> None:
        """Wait for all ranks.

        Raises:
            CheckpointError: a rank did not join in time; rank 0 names it.
        """
        began = time.monotonic()
        try:
            dist.monitored_barrier(self.group, timeout=self._meet_timeout, wait_all_ranks=True)
        except RuntimeError as error:
            seconds, waited_s = self._meet_timeout.total_seconds(), time.monotonic() - began
            found = re.search(r"[Rr]anks? ([\d, ]+) failed", str(error))
            who = "rank 0" if self.rank else f"rank {found.group(1).strip()}" if found else "another rank"
            if waited_s < seconds * 0.9:  # not a timeout: the connection was closed
                raise CheckpointError(
                    f"{what} was abandoned after {waited_s:.0f} s: {who} ended (Connection closed by peer); earlier checkpoints are untouched"
                ) from None
            if self.rank != 0:
                raise CheckpointError(
                    f"{what} was abandoned: not all ranks joined within {seconds:.0f} s, or rank 0 ended; rank 0 names the missing ranks"
                ) from None
            raise CheckpointError(
                f"{what}: {who} did not join within {seconds:.0f} s (checkpoint.timeout_s), and every rank must; "
                "earlier checkpoints are untouched"
            ) from None

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run an action on all ranks, and fail on all if it failed on one.

        Returns:
            The results of all ranks, in rank order.

        Raises:
            CheckpointError: on every rank; names the first rank that failed.
        """
        mine: tuple[T | None, str | None] = (None, None)
        try:
            mine = (action(), None)
        except CheckpointError as error:
            mine = (None, str(error))
        except OSError as error:
            mine = (None, f"{error.filename or ''}: {error.strerror or error}".lstrip(": ") + self._full())
        except Exception as error:  # noqa: BLE001 - errors of other libraries' writers; the other ranks must fail, too
            mine = (None, (str(error) or type(error).__name__).splitlines()[0] + self._full())
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine, group=self.group)
        for rank, (_, problem) in enumerate(answers):
            if problem is not None:
                raise CheckpointError(
                    f"the checkpoint could not be saved: rank {rank} failed to {what}: {problem}. Earlier checkpoints are untouched"
                )
        return [value for value, _ in answers]

    def _full(self) -> str:
        """Mention the free space if it is low: torch's writer reports a full disk as "unexpected pos"."""
        low = low_space_text(self._folder) if self._folder else ""
        return f" ({low})" if low else ""

    def first(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only, and return its result on all ranks; otherwise like `each`."""
        return self.each(what, lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]
