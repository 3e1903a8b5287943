"""The Trainer with this project's data, loss and sticky skip of steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from allranks.errors import EnvironmentNotAble
from allranks.train.hf.feed import Micro
from allranks.train.hf.running import Running
from allranks.train.strategies.common import skip_if_not_finite


class RanksTrainer(Trainer):
    """Trains the micro-batches of a loader that is already this rank's.

    The loss of a micro-batch is its sum over trained tokens, divided by the trained tokens of the step over all ranks
    and multiplied by their number, since the wrapper averages gradients over ranks.

    Args:
        begin: called before the data of each step with the number of steps that this Trainer has done.
    """

    loss_is_scaled_for_ga = True  # the Trainer is not to divide by the number of micro-steps as well

    def __init__(
        self, *, feed: DataLoader[Micro], running: Running, ranks: int, begin: Callable[[int], None], **kwargs: Any
    ) -> None:
        self._feed, self._running, self._ranks, self._begin = feed, running, ranks, begin
        self._checked = False
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Micro]:
        """Not prepared by Accelerate, which would share out once more what is one rank's part."""
        return self._feed

    def get_batch_samples(
        self, epoch_iterator: Iterator[Micro], num_batches: int, device: torch.device
    ) -> tuple[list[Micro], int]:
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
