"""Run the optimizer steps with Hugging Face's Trainer in place of the loop, with the same data, loss, records and
stops.

The Trainer's subclass reads this rank's rows with their row numbers, computes the loss and accounts for its steps;
steps with non-finite values are skipped on all ranks. The scheduler uses the run's learning rates, callbacks write the
step records, and checks refuse launch settings that silently break the Trainer.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from typing import Any

import accelerate
import msgspec
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_callback import PrinterCallback

from allranks.errors import EnvironmentNotAble, ProofFailed
from allranks.rundir.events import EventLog
from allranks.spec.strategies import hf_trainer
from allranks.train import distributed
from allranks.train.data.batches import Batch, Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.loop import StepWatcher, learning_rate, set_learning_rate
from allranks.train.patches import define_cpu_set_device
from allranks.train.step_metrics import LoopPlan, ReducedStep, StepMetrics, StepWork, TokenCounts, TrainingRows
from allranks.train.step_timers import StepTimer
from allranks.train.strategies.base import (
    MakeOptimizer,
    ReplicatedWeights,
    Sizes,
    Traffic,
    skip_if_not_finite,
    trained_parameters,
)
from allranks.train.sync_proof import prove_weights

NORM_TOLERANCE = 1e-5  # of the mean norm; averaged gradients are equal to the last bit


class RowDataset(IterableDataset[Batch]):
    """Yield the micro-batches of steps ``first`` to ``last`` (exclusive), in the same order as every engine."""

    def __init__(self, order: SampleOrder, make_batch: Callable[[Rows], Batch], first: int, last: int) -> None:
        self._order, self._make, self._first, self._last = order, make_batch, first, last

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._first, self._last):
            for rows in self._order.micro_batches(step):
                yield self._make(rows)


class TrainerStep:
    """Collect losses, norms and times of one step of the Trainer."""

    def __init__(self, device: torch.device, part: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = StepTimer(device)
        self._device, self._part = device, part
        self._open = ExitStack()
        self.abandon = self._open.close

    def begin(self, step: int, trained: int, rate: float) -> None:
        """Start optimizer step `step` (from 0); all ranks together train `trained` tokens at learning rate `rate`."""
        self.step, self.trained, self._rate = step, trained, rate
        self._sequences: list[int] = []
        self._counts = TokenCounts()
        self.norm: torch.Tensor | None = None  # of the gradient, before clipping
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

    def add(self, batch: Batch, loss: torch.Tensor) -> None:
        """Add a micro-batch after its forward pass; `loss` is its sum over trained tokens."""
        self._sequences += batch.sequences
        self._counts.add(batch)
        self._loss_sum += loss.detach().float()

    def end(self) -> StepWork:
        """Return the record of the step."""
        if self.norm is None:
            raise unsupported("did not compute the gradient norm, so a non-finite loss would not be noticed")
        return StepWork(
            step=self.step,
            loss_sum=self._loss_sum,
            grad_norm=self.norm,
            counts=self._counts,
            trained=self.trained,
            lr=self._rate,
            times=self.clock.end_step(),
            sequences=self._sequences,
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
        self, *, feed: DataLoader[Batch], running: TrainerStep, ranks: int, begin: Callable[[int], None], **kwargs: Any
    ) -> None:
        self._feed, self._running, self._ranks, self._begin = feed, running, ranks, begin
        self._checked = False
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader without Accelerate's preparation, which would divide this rank's part among ranks again."""
        return self._feed

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int]:
        """Return the step's micro-batches and the trained tokens of all ranks, known without communication."""
        self._begin(self.state.global_step)
        self._running.enter("data")
        batches = list(islice(epoch_iterator, num_batches))  # fewer where the loader ends early: the proof refuses it
        self._running.leave("data")
        return batches, self._running.trained

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # already on the device

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0; FLOPs are computed from the model elsewhere."""
        return 0

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return this micro-batch's share of the step's mean loss, times the number of ranks."""
        self._running.enter("forward")
        loss = model(inputs)
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
            raise unsupported(
                f"ran backward from {float(used):.6g}, but the step's token-weighted loss is {float(share):.6g}: it "
                "averages over micro-steps on its own"
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
        self._running.norm = norm
        return norm


def unsupported(problem: str) -> EnvironmentNotAble:
    """Return the error for a version of transformers whose Trainer does not do what this engine needs."""
    return EnvironmentNotAble(
        f"hf_trainer: the Trainer of transformers {transformers.__version__} {problem}. Use a version that this "
        "project was tested with (5.23), or strategy pytorch_ddp"
    )


def check_wrapped(trainer: Any, world: DistContext, find_unused_parameters: bool) -> None:
    """Raise `ProofFailed` unless the Trainer sees all ranks, on their devices, and its model averages gradients."""
    processes = trainer.accelerator.num_processes
    ours, its = world.device, trainer.args.device
    if processes != world.size:
        problem = f"Accelerate sees {processes} processes, the run has {world.size} ranks: this rank would train alone"
    elif ours.type != its.type or (ours.type == "cuda" and ours.index != its.index):
        problem = f"the Trainer computes on {its}, this rank on {ours}"
    elif world.size == 1:
        return
    elif not isinstance(wrapped := trainer.model_wrapped, DistributedDataParallel):
        problem = (
            f"the Trainer left the model as a {type(wrapped).__name__} instead of wrapping it in "
            "DistributedDataParallel: the ranks' weights would diverge silently (on CPUs it wraps only with use_cpu)"
        )
    elif (size := dist.get_world_size(wrapped.process_group)) != world.size:
        problem = f"the wrapper averages over {size} of {world.size} ranks"
    elif bool(wrapped.find_unused_parameters) != find_unused_parameters:
        problem = f"the wrapper's find_unused_parameters is {wrapped.find_unused_parameters}, not as in the spec"
    else:
        return
    raise ProofFailed(f"hf_trainer: {problem}")


def bucket_bytes(wrapped: Any) -> int:
    """Return the bytes of the wrapper's buckets beside the gradients: 0 if gradients are views into the buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.gradient_as_bucket_view:
        return 0
    sizes = wrapped._get_ddp_logging_data().get("bucket_sizes", "")
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def check_norms(rank: int, agreed: ReducedStep) -> None:
    """Raise `ProofFailed` unless this rank's gradient norm equals the mean over ranks, as it must after averaging.

    Both come with each step's reduced metrics, so that the check neither communicates nor waits for the device.
    """
    own = agreed.own_grad_norm
    if abs(own - agreed.grad_norm) > NORM_TOLERANCE * max(abs(agreed.grad_norm), torch.finfo(torch.float32).tiny):
        raise ProofFailed(
            f"step {agreed.step + 1}: rank {rank} has a gradient norm of {own:.8g}, the mean over ranks is "
            f"{agreed.grad_norm:.8g}: gradients are not averaged over the ranks, so the weights diverge"
        )


class TrainerLoop(TrainerCallback):
    """Run optimizer steps in a Trainer until all planned steps are done or all ranks agree to stop."""

    def __init__(
        self,
        world: DistContext,
        strategy: HFTrainer,
        rows: TrainingRows,
        plan: LoopPlan,
        events: EventLog,
        watcher: StepWatcher | None = None,
    ) -> None:
        self._world, self._strategy, self._plan, self._events = world, strategy, plan, events
        self._order = rows.order
        self._make_batch: Callable[[Rows], Batch] = lambda micro: rows.make_batch(micro).to(world.device)
        self._watcher = watcher or StepWatcher()
        self._running = TrainerStep(world.device, self._watcher.part)
        self._step_metrics = StepMetrics(
            world, rows, plan, events, self._running.clock, lambda work, agreed: check_norms(world.rank, agreed)
        )
        self._watcher.attach(self._step_metrics.quiet)
        self._running.clock.follow(strategy.module)
        self._done = plan.first_step

    def run(self) -> int:
        """Run all steps; return how many are done, the same number on every rank.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the named step.
            ProofFailed: the Trainer does not train as a rank of this run, or the weights diverged.
        """
        if self._plan.first_step < self._plan.total_steps:
            self._random = distributed.rng_state()
            self._began = time.perf_counter()
            # the Trainer requires a folder, and writes nothing there
            with tempfile.TemporaryDirectory(prefix="allranks-trainer-") as folder:
                self._trainer = self._made(folder)
                try:
                    self._trainer.train()
                finally:
                    self._running.abandon()
                    self._step_metrics.close()
                # Only after success: freeing memory waits for the device, which may be in a collective that a failed
                # rank never joins.
                self._trainer.accelerator.free_memory()
                del self._trainer
                gc.collect()  # the Trainer has reference cycles, which would keep the wrapper's buckets alive
            self._step_metrics.drain()
            prove_weights(self._world, self._strategy.module, f"proof after step {self._done}")
        return self._done

    def _made(self, folder: str) -> RanksTrainer:
        plan, strategy = self._plan, self._strategy
        first, total = plan.first_step, plan.total_steps
        micro = self._order.micro_batches(0)
        given = hf_trainer.complete_arguments(
            strategy.args,
            hf_trainer.TrainerExpectations(
                train=msgspec.structs.replace(plan.train, max_grad_norm=strategy.clip_norm),
                micro_batch_size=len(micro[0]),
                grad_accum=len(micro),
                world_size=self._world.size,
                device=self._world.device.type,
                find_unused_parameters=strategy.find_unused_parameters,
                backend=dist.get_backend(self._world.group),
            ),
        )
        feed = RowDataset(self._order, self._make_batch, first, total)
        define_cpu_set_device()
        return RanksTrainer(
            # with its own generator: the default one would change dropout's random state
            feed=DataLoader(feed, batch_size=None, generator=torch.Generator()),
            running=self._running,
            ranks=self._world.size,
            begin=self._step_begins,
            model=strategy.module,
            args=transformers.TrainingArguments(**{**given, "output_dir": folder, "max_steps": total - first}),
            # the schedule of the run is set at the beginning of each step
            optimizers=(strategy.optimizer, LambdaLR(strategy.optimizer, lambda step: 1.0)),
            callbacks=[self],
        )

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Check the wrapped model and fix its bucket layout before training."""
        check_wrapped(self._trainer, self._world, self._strategy.find_unused_parameters)
        if self._world.size > 1:
            self._strategy.bucket_bytes = bucket_bytes(self._trainer.model_wrapped)
            if self._plan.first_step or self._plan.settled:
                # DDP rebuilds its buckets after the first backward pass, and with three or more ranks the sums depend
                # on the layout: without a pass whose gradients are discarded, the first step after a resume would be
                # rounded differently
                model: Any = self._trainer.model_wrapped
                model.train()
                (model(self._make_batch(self._order.micro_batches(self._plan.first_step)[0])) * 0.0).backward()
                self._strategy.optimizer.zero_grad(set_to_none=True)
                if self._plan.router_loss is not None:
                    self._plan.router_loss.take()
        self._events.write(
            "engine",
            engine="hf_trainer",
            version=transformers.__version__,
            accelerate=accelerate.__version__,
            wrapper=type(self._trainer.model_wrapped).__name__,
            find_unused_parameters=self._strategy.find_unused_parameters,
            initialize_s=round(time.perf_counter() - self._began, 3),
        )
        distributed.set_rng_state(self._random)  # the Trainer has seeded all ranks equally
        self._running.clock.pause()

    def _step_begins(self, done: int) -> None:
        step = self._plan.first_step + done
        self._watcher.step_begins(step)
        rate = learning_rate(self._plan.train, step, self._plan.total_steps)
        set_learning_rate(self._strategy.optimizer, rate)
        self._running.begin(step, self._step_metrics.trained(step), rate)

    def on_optimizer_step(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Record that the optimizer has made its step."""
        self._running.leave("optimizer")

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step, run the callbacks that are due, and end the training when all ranks agree to stop."""
        work = self._running.end()
        step = work.step
        with self._watcher.part("control"):
            agreed = self._step_metrics.exchange(work)
        if self._watcher.step_ends(step):
            self._running.clock.pause()
        self._done = step + 1
        stop = self._step_metrics.process_reduced(agreed)
        if stop or self._plan.is_due(self._done):
            stop = self._step_metrics.run_callbacks(self._done, stop)
            self._running.clock.pause()
        elif self._done == self._plan.total_steps:
            self._step_metrics.count_queued_work()  # before the Trainer's own end
        if stop:
            control.should_training_stop = True


class HFTrainer(ReplicatedWeights):
    """Hold model, optimizer and state for a `TrainerLoop`."""

    claims_overlap = True

    def __init__(self, find_unused_parameters: bool, args: dict[str, Any] | None) -> None:
        self.find_unused_parameters, self.args = find_unused_parameters, args
        self.engine_config = args

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)
        self.clip_norm = clip_norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", None, sizes.trained_bytes)]
