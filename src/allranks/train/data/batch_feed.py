"""Make the micro-batches of a rank in the order of training, and on a GPU one ahead of their use.

On a GPU a thread collates the next micro-batch while the current one computes. It packs the tensors into one of two
pinned buffers, and copies them to the device with one copy on a stream of its own; the stream of the computation waits
for that copy, the host does not.

A rank that computes on a CPU makes each batch when it is used: collating 4,096 tokens takes 0.4 ms of its core, with a
thread and a second copy 1.3 ms (processor time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allranks.train.data.batches import Rows, SampleOrder

ALIGNMENT_BYTES = 256
"""So that each tensor begins where an allocation of its own could."""


class HostBatch(Protocol):
    """A micro-batch in host memory."""

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return a copy with what the function returns for each tensor that the device needs, always in the same
        order."""
        ...


@dataclass(frozen=True)
class SentBatch:
    """A micro-batch whose copy to the device has been started.

    ``memory`` holds all tensors of ``batch`` on the device. ``arrived`` is None if the device is a CPU.
    """

    batch: Any
    memory: torch.Tensor
    arrived: torch.cuda.Event | None


class PinnedBuffers:
    """Two host buffers, from which batches are copied to the device in turn. On a GPU they are pinned, and copies are
    asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, batch: HostBatch) -> SentBatch:
        """Start to copy a batch to the device. The batch itself is not needed any more."""
        tensors: list[torch.Tensor] = []

        def add(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        batch.map_tensors(add)
        spans, size = _spans(tensors)
        at, self._turn = self._turn, 1 - self._turn
        host = self._free_buffer(at, size)
        for tensor, (start, end) in zip(tensors, spans, strict=True):
            host[start:end].copy_(tensor.reshape(-1).view(torch.uint8))
        memory, self._copied[at] = self._copy(host[:size])
        views = iter(
            [memory[start:end].view(t.dtype).view(t.shape) for t, (start, end) in zip(tensors, spans, strict=True)]
        )
        return SentBatch(batch.map_tensors(lambda _: next(views)), memory, self._copied[at])

    def use(self, sent: SentBatch) -> Any:
        """Return a batch for the current stream, which waits for the copy. The host does not wait."""
        if sent.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.arrived)
            # it was allocated on the stream of the copies, which must not use it again before this stream has read it
            sent.memory.record_stream(stream)
        return sent.batch

    def _free_buffer(self, at: int, size: int) -> torch.Tensor:
        """Return a buffer when the last copy out of it is over; a larger one if it is too small."""
        last = self._copied[at]
        if last is not None:
            last.synchronize()
        if self._buffers[at].numel() < size:
            self._buffers[at] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffers[at]

    def _copy(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            memory = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
            memory.copy_(host, non_blocking=True)
            if self._stream is None:
                return memory, None
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            return memory, arrived


def _spans(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Return first and last byte (exclusive) of each tensor in a buffer, and the bytes of all."""
    spans, size = [], 0
    for tensor in tensors:
        start = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = start + tensor.numel() * tensor.element_size()
        spans.append((start, size))
    return spans, size


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
        self._coming: Future[SentBatch] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if (device.type == "cuda") if ahead is None else ahead:
            self._buffers = PinnedBuffers(device)
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
        coming = self._coming or self._thread.submit(self._send, next(self._rows))
        sent = coming.result()
        rows = next(self._rows, None)
        self._coming = None if rows is None else self._thread.submit(self._send, rows)
        return self._buffers.use(sent)

    def _send(self, rows: Rows) -> SentBatch:
        return self._buffers.send(self._make(rows))

    def close(self) -> None:
        """End the thread, and forget what was made ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._coming = None
