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


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch and the sequences it was made of."""

    rows: Rows
    batch: Batch


class RowDataset(IterableDataset[MicroBatch]):
    """The micro-batches of steps ``first`` to ``last`` (not included), in the order in which every engine takes them."""

    def __init__(self, order: SampleOrder, make_batch: Callable[[Rows], Batch], first: int, last: int) -> None:
        self._order, self._make, self._first, self._last = order, make_batch, first, last
        self._seen: MicroBatch | None = None

    def peek(self) -> MicroBatch:
        """The first micro-batch. It is still to come, and is not made twice."""
        rows = self._order.micro_batches(self._first)[0]
        self._seen = self._seen or MicroBatch(rows, self._make(rows))
        return self._seen

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self._first, self._last):
            for rows in self._order.micro_batches(step):
                seen, self._seen = self._seen, None
                yield seen or MicroBatch(rows, self._make(rows))


def loader(feed: RowDataset) -> DataLoader[MicroBatch]:
    """A loader in this process. It has a generator of its own: else it would draw from the one that dropout draws from."""
    return DataLoader(feed, batch_size=None, generator=torch.Generator())


def check_rows(order: SampleOrder, step: int, fed: list[Rows]) -> None:
    """What the Trainer really trained in a step is what was planned for this rank.

    Raises:
        ProofFailed: other rows, or another order.
    """
    planned = order.micro_batches(step)
    if len(fed) != len(planned) or any(not np.array_equal(a, b) for a, b in zip(fed, planned, strict=False)):
        raise ProofFailed(
            f"step {step + 1}: the Trainer trained sequences {_first_few(fed)}, planned were {_first_few(planned)}; "
            "something has put another loader or sampler in between"
        )


def prove_fed(world: DistContext, order: SampleOrder, step: int, fed: list[Rows]) -> None:
    """What all ranks trained in a step is its global batch, each sequence as often as planned. Every rank calls.

    Raises:
        ProofFailed: sequences were trained twice, or by nobody.
    """
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, [int(r) for rows in fed for r in rows], group=world.control)
    trained = sorted(r for rows in every for r in rows)
    planned = sorted(int(r) for r in order.global_batch(step))
    if trained == planned:
        return
    shared = next(
        ((a, b, both) for a in range(world.size) for b in range(a) if (both := set(every[a]) & set(every[b]))), None
    )
    who = f"; rank {shared[0]} and rank {shared[1]} both trained {sorted(shared[2])[:8]}" if shared else ""
    raise ProofFailed(
        f"step {step + 1}: the ranks together trained {len(set(trained))} different sequences of {len(set(planned))} planned{who}. "
        "Each rank must read its own part of the data"
    )


def _first_few(parts: list[Rows]) -> list[int]:
    return [int(r) for rows in parts for r in rows][:8]


class TrainerStep:
    """Collects what the Trainer does between the data of a step and its end."""

    def __init__(self, device: torch.device, part: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = StepTimer(device)
        self._device, self._part = device, part
        self._open = ExitStack()

    def begin(self, step: int, trained: int, rate: float) -> None:
        """Before the data of optimizer step `step` (from 0), whose ranks train so many tokens at this rate."""
        self.step, self.trained, self._rate = step, trained, rate
        self.fed: list[Rows] = []
        self._counts, self._norm = TokenCounts(), None
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        self.clock.begin()

    def enter(self, name: str) -> None:
        """A part of the step begins; the one before it is over."""
        self._open.close()
        self._open.enter_context(self._part(name))

    def leave(self, name: str) -> None:
        """The part is over; its time counts."""
        self._open.close()
        self.clock.lap(name)

    def abandon(self) -> None:
        """The step is not going to end."""
        self._open.close()

    def add(self, micro: MicroBatch, loss: torch.Tensor) -> None:
        """A micro-batch went forward; `loss` is its sum over trained tokens."""
        self.fed.append(micro.rows)
        self._counts.add(micro.batch)
        self._loss_sum += loss.detach().float()

    def clipped(self, norm: torch.Tensor) -> None:
        """The gradients' norm before clipping."""
        self._norm = norm

    def end(self) -> StepWork:
        """The step as it goes into the ledger.

        Raises:
            EnvironmentNotAble: this version of transformers works in another way.
        """
        if self._norm is None:
            import transformers

            raise EnvironmentNotAble(
                f"hf_trainer: the Trainer of transformers {transformers.__version__} did not ask for the gradients' norm, "
                "so that a loss that is not finite would go unseen; use a version that this project was tested with (5.23), "
                "or strategy pytorch_ddp"
            )
        return StepWork(
            self.step, self._loss_sum, self._norm, self._counts, self.trained, self._rate, self.clock.end_step()
        )


class RanksTrainer(Trainer):
    """Trains the micro-batches of a loader that is already this rank's.

    The loss of a micro-batch is its sum over trained tokens, divided by the trained tokens of the step over all ranks
    and multiplied by their number, since the wrapper averages gradients over ranks.

    Args:
        begin: called before the data of each step with the number of steps that this Trainer has done.
    """

    loss_is_scaled_for_ga = True  # the Trainer is not to divide by the number of micro-steps as well

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
        """Not prepared by Accelerate, which would share out once more what is one rank's part."""
        return self._feed

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatch], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], int]:
        """The step's micro-batches, and the tokens that all ranks train in it: nobody is asked for them."""
        self._begin(self.state.global_step)
        self._running.enter("data")
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        self._running.leave("data")
        return batches, self._running.trained

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # on the device already

    def floating_point_ops(self, inputs: Any) -> int:
        """Counted from the model elsewhere."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """This micro-batch's share of the step's mean loss, times the number of ranks."""
        self._running.enter("forward")
        loss = model(inputs.batch)
        self._running.leave("forward")
        self._running.add(inputs, loss)
        self._share = loss * (self._ranks / max(int(num_items_in_batch), 1))
        self._running.enter("backward")
        return self._share

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a micro-batch."""
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
        """Once: what went backward is what `compute_loss` gave."""
        self._checked = True
        share = self._share.detach()
        if not torch.allclose(used, share, rtol=1e-6, atol=0.0, equal_nan=True):
            import transformers

            raise EnvironmentNotAble(
                f"hf_trainer: the Trainer of transformers {transformers.__version__} went backward from {float(used):.6g} where "
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
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate has wrapped it
        skip_if_not_finite(inner, norm)
        self._running.clipped(norm)
        return norm
