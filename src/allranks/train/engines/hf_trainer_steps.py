"""Subclass Hugging Face's Trainer: its row loader, the accounting of its steps, and its loss.

The loader yields this rank's rows with their row numbers. Steps with non-finite values are skipped on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from allranks.errors import EnvironmentNotAble, ProofFailed
from allranks.train.data.batches import Batch
from allranks.train.data.sampler import Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.step_metrics import StepWork, TokenCounts
from allranks.train.step_timers import StepTimer
from allranks.train.strategies.base import skip_if_not_finite
from allranks.train.sync_proof import refuse_rows


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and the numbers of its sequences."""

    rows: Rows
    batch: Batch


class RowDataset(IterableDataset[MicroBatch]):
    """Yield the micro-batches of steps ``first`` to ``last`` (exclusive), in the same order as every engine."""

    def __init__(self, order: SampleOrder, make_batch: Callable[[Rows], Batch], first: int, last: int) -> None:
        self._order, self._make, self._first, self._last = order, make_batch, first, last
        self._seen: MicroBatch | None = None

    def peek(self) -> MicroBatch:
        """Return the first micro-batch without consuming it."""
        rows = self._order.micro_batches(self._first)[0]
        self._seen = self._seen or MicroBatch(rows, self._make(rows))
        return self._seen

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self._first, self._last):
            for rows in self._order.micro_batches(step):
                seen, self._seen = self._seen, None
                yield seen or MicroBatch(rows, self._make(rows))


def loader(feed: RowDataset) -> DataLoader[MicroBatch]:
    """Return a loader that runs in this process, with its own generator: the default one would change dropout's random state."""
    return DataLoader(feed, batch_size=None, generator=torch.Generator())


def check_rows(order: SampleOrder, step: int, fed: list[Rows]) -> None:
    """Check that the Trainer trained the rows that were planned for this rank and step.

    Raises:
        ProofFailed: the rows or their order differ.
    """
    planned = order.micro_batches(step)
    if len(fed) != len(planned) or any(not np.array_equal(a, b) for a, b in zip(fed, planned, strict=False)):
        raise ProofFailed(
            f"step {step + 1}: the Trainer trained sequences {_first_few(fed)}, the plan was {_first_few(planned)}; "
            "its loader or sampler was replaced"
        )


def prove_fed(world: DistContext, order: SampleOrder, step: int, fed: list[Rows]) -> None:
    """Check that all ranks together trained the global batch, each sequence as often as planned. Collective.

    Raises:
        ProofFailed: sequences were trained twice or not at all.
    """
    mine = [int(r) for rows in fed for r in rows]
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, mine, group=world.control)
    if sorted(r for rows in every for r in rows) != sorted(order.global_batch(step).tolist()):
        refuse_rows(world, step, mine, order)


def _first_few(parts: list[Rows]) -> list[int]:
    return [int(r) for rows in parts for r in rows][:8]


class TrainerStep:
    """Collect losses, norms and times of one step of the Trainer."""

    def __init__(self, device: torch.device, part: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = StepTimer(device)
        self._device, self._part = device, part
        self._open = ExitStack()

    def begin(self, step: int, trained: int, rate: float) -> None:
        """Start optimizer step `step` (from 0), in which all ranks together train `trained` tokens at learning rate `rate`."""
        self.step, self.trained, self._rate = step, trained, rate
        self.fed: list[Rows] = []
        self._sequences: list[int] = []
        self._counts, self._norm = TokenCounts(), None
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        self.clock.begin()

    def enter(self, name: str) -> None:
        """Start a part of the step and end the one before it."""
        self._open.close()
        self._open.enter_context(self._part(name))

    def leave(self, name: str) -> None:
        """End the part and record its time."""
        self._open.close()
        self.clock.lap(name)

    def abandon(self) -> None:
        """Discard a step that does not end."""
        self._open.close()

    def add(self, micro: MicroBatch, loss: torch.Tensor) -> None:
        """Add a micro-batch after its forward pass; `loss` is its sum over trained tokens."""
        self.fed.append(micro.rows)
        self._sequences += micro.batch.sequences
        self._counts.add(micro.batch)
        self._loss_sum += loss.detach().float()

    def clipped(self, norm: torch.Tensor) -> None:
        """Record the gradient norm before clipping."""
        self._norm = norm

    def end(self) -> StepWork:
        """Return the record of the step.

        Raises:
            EnvironmentNotAble: this version of transformers is not supported.
        """
        if self._norm is None:
            import transformers

            raise EnvironmentNotAble(
                f"hf_trainer: the Trainer of transformers {transformers.__version__} did not compute the gradient norm, "
                "so a non-finite loss would not be noticed; use a version that this project was tested with (5.23), "
                "or strategy pytorch_ddp"
            )
        return StepWork(
            self.step,
            self._loss_sum,
            self._norm,
            self._counts,
            self.trained,
            self._rate,
            self.clock.end_step(),
            self._sequences,
        )


class RanksTrainer(Trainer):
    """Train on a loader that yields only this rank's micro-batches.

    The loss of a micro-batch is its sum over trained tokens, divided by the trained tokens of the step over all ranks
    and multiplied by the number of ranks, because the wrapper averages gradients over ranks.

    Args:
        begin: called before the data of each step, with the number of steps done by this Trainer.
    """

    loss_is_scaled_for_ga = True  # so that the Trainer does not also divide by the number of micro-steps

    def __init__(
        self,
        *,
        feed: DataLoader[MicroBatch],
        running: TrainerStep,
        ranks: int,
        begin: Callable[[int], None],
        **kwargs: Any,
    ) -> None:
        self._feed, self._running, self._ranks, self._begin = feed, running, ranks, begin
        self._checked = False
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[MicroBatch]:
        """Return the loader without Accelerate's preparation, which would divide this rank's part among the ranks again."""
        return self._feed

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatch], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], int]:
        """Return the step's micro-batches and the trained tokens of all ranks, known without communication."""
        self._begin(self.state.global_step)
        self._running.enter("data")
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        self._running.leave("data")
        return batches, self._running.trained

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # already on the device

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0; FLOPs are computed from the model elsewhere."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Return this micro-batch's share of the step's mean loss, times the number of ranks."""
        self._running.enter("forward")
        loss = model(inputs.batch)
        self._running.leave("forward")
        self._running.add(inputs, loss)
        self._share = loss * (self._ranks / max(int(num_items_in_batch), 1))
        self._running.enter("backward")
        return self._share

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch."""
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except BaseException:
            self._running.abandon()
            raise
        self._running.leave("backward")
        if not self._checked:
            self._refuse_other_loss(loss)
        return loss

    def _refuse_other_loss(self, used: torch.Tensor) -> None:
        """Check once that the Trainer ran backward from the loss of `compute_loss`."""
        self._checked = True
        share = self._share.detach()
        if not torch.allclose(used, share, rtol=1e-6, atol=0.0, equal_nan=True):
            import transformers

            raise EnvironmentNotAble(
                f"hf_trainer: the Trainer of transformers {transformers.__version__} ran backward from {float(used):.6g}, but "
                f"the step's token-weighted loss is {float(share):.6g}: it averages over micro-steps on its own. "
                "Use a version that this project was tested with (5.23), or strategy pytorch_ddp"
            )

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._running.enter("optimizer")
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self._running.enter("optimizer")
        norm = torch.as_tensor(super()._get_grad_norm(model, grad_norm=grad_norm)).float()
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        skip_if_not_finite(inner, norm)
        self._running.clipped(norm)
        return norm
