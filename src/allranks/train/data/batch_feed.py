"""Make the micro-batches of a rank in the order of training, and on a GPU one ahead of their use.

On a GPU a thread collates the next micro-batch into pinned memory while the current one computes; when it is used, its
copies are queued on the stream of the computation, and the host does not wait. A rank that computes on a CPU makes each
batch when it is used: a thread would compete for its core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from allranks.train.data.batches import Rows, SampleOrder


class BatchFeed:
    """The micro-batches of steps ``first`` to ``last`` (exclusive) on the device, one after the other.

    Which rows belong to a step does not depend on what was made ahead: a resume begins with the step after the
    checkpoint's.

    Args:
        make_batch: collates rows in host memory; called in another thread if `ahead`.
        ahead: make each batch while the one before is used; None: on a GPU.
    """

    def __init__(
        self,
        order: SampleOrder,
        make_batch: Callable[[Rows], Any],
        device: torch.device,
        first: int,
        last: int,
        *,
        ahead: bool | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:  # a thread cannot choose "the current one" of another thread
            device = torch.device("cuda", torch.cuda.current_device())
        self._make, self._device = make_batch, device
        self._rows: Iterator[Rows] = (rows for step in range(first, last) for rows in order.micro_batches(step))
        self._coming: Future[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if (device.type == "cuda") if ahead is None else ahead:
            # a thread begins with the first GPU of the machine, whatever the main thread has chosen
            choose = {"initializer": torch.cuda.set_device, "initargs": (device,)} if device.type == "cuda" else {}
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", **choose)

    def take(self) -> Any:
        """Return the next micro-batch.

        Raises:
            StopIteration: there is none.
            Exception: what `make_batch` raised for this micro-batch.
        """
        if self._thread is None:
            return self._make(next(self._rows)).to(self._device)
        coming = self._coming or self._thread.submit(self._made_ahead, next(self._rows))
        batch = coming.result()
        rows = next(self._rows, None)
        self._coming = None if rows is None else self._thread.submit(self._made_ahead, rows)
        return batch.to(self._device)

    def _made_ahead(self, rows: Rows) -> Any:
        batch = self._make(rows)
        return batch.map_tensors(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch

    def close(self) -> None:
        """End the thread, and forget what was made ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._coming = None
