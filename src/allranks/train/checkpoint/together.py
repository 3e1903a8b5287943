"""Agreement between ranks while a checkpoint is made, on a process group of its own, each wait bounded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from allranks.errors import CheckpointError

T = TypeVar("T")
HARDLY_ANY = 32 * 2**20  # bytes free on a disk, below which that is told with every failure to write


class Together:
    """What all ranks do, or fail to do, as one.

    Args:
        meet_timeout_s: how long ranks may wait for one that does not come to a save.
        work_timeout_s: how long one may take to write its part.
        folder: where it is written; None where nothing is.
    """

    def __init__(self, meet_timeout_s: float, work_timeout_s: float, folder: Path | None = None) -> None:
        self.work_timeout_s, self._folder = work_timeout_s, folder
        self._meet_timeout = timedelta(seconds=meet_timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=work_timeout_s), group_desc="checkpoint")
        self.group = cast(dist.ProcessGroup, group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def meet(self, what: str) -> None:
        """Wait until all ranks are here.

        Raises:
            CheckpointError: one did not come in time; rank 0 names it.
        """
        try:
            dist.monitored_barrier(self.group, timeout=self._meet_timeout, wait_all_ranks=True)
        except RuntimeError as error:
            seconds = self._meet_timeout.total_seconds()
            if self.rank != 0:
                raise CheckpointError(
                    f"{what} was given up: not all ranks took part within {seconds:.0f} s, or rank 0 ended; rank 0 names those missing"
                ) from None
            found = re.search(r"[Rr]anks? ([\d, ]+) failed", str(error))
            who = f"rank {found.group(1).strip()}" if found else "another rank"
            raise CheckpointError(
                f"{what}: {who} took no part in it within {seconds:.0f} s (checkpoint.timeout_s), and every rank must; "
                "earlier checkpoints are untouched"
            ) from None

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Do a part on all ranks, and fail on all if it failed on one.

        Returns:
            What each rank's gave, in order of rank.

        Raises:
            CheckpointError: on every rank; names the first that failed.
        """
        mine: tuple[T | None, str | None] = (None, None)
        try:
            mine = (action(), None)
        except CheckpointError as error:
            mine = (None, str(error))
        except OSError as error:
            mine = (None, f"{error.filename or ''}: {error.strerror or error}".lstrip(": ") + self._full())
        except Exception as error:  # noqa: BLE001 - from writers of other libraries; the others must hear of it
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
        """Whether it may be for the disk: writers of other libraries do not say so (torch's: "unexpected pos")."""
        free = shutil.disk_usage(self._folder).free if self._folder and self._folder.exists() else HARDLY_ANY
        return f" ({free / 2**20:.1f} MiB are free in {self._folder})" if free < HARDLY_ANY else ""

    def first(self, what: str, action: Callable[[], T]) -> T:
        """The same, of what rank 0 does alone; all get what it gave."""
        return self.each(what, lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]
