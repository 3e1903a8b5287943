"""Run the optimizer steps with Hugging Face's Trainer in place of the loop, with the same data, loss, records and stops.

The scheduler uses the run's learning rates, callbacks write the step records, and checks refuse launch settings that silently
break the Trainer.
"""

from __future__ import annotations

import gc
import tempfile
import time
from typing import Any, Protocol

import accelerate
import msgspec
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl

from allranks.errors import EnvironmentNotAble, ProofFailed
from allranks.rundir.events import EventLog
from allranks.spec import trainer_arguments
from allranks.spec.records import TrainSpec
from allranks.train import distributed
from allranks.train.distributed import DistContext
from allranks.train.engines.hf_trainer_steps import RanksTrainer, RowDataset, TrainerStep, check_rows, loader, prove_fed
from allranks.train.loop import NullStepWatcher, StepWatcher
from allranks.train.optimizer import learning_rate
from allranks.train.patches import define_cpu_set_device
from allranks.train.step_metrics import LoopOutcome, LoopPlan, ReducedStep, StepMetrics, TrainingRows
from allranks.train.strategies.base import MakeOptimizer, ReplicatedWeights, Sizes, Traffic, trained_parameters
from allranks.train.sync_proof import prove_weights

NORM_TOLERANCE = 1e-5  # of the mean norm; averaged gradients are equal to the last bit


class TrainerEvents(Protocol):
    """Receive the Trainer's events."""

    def train_begins(self) -> None: ...

    def updated(self) -> None: ...

    def step_ended(self) -> bool:
        """Return whether all ranks must stop."""
        ...


class MetricsCallback(TrainerCallback):
    """Report the wrapped model, each update, and the end of each step; end the training when all ranks agree to stop."""

    def __init__(self, steps: TrainerEvents) -> None:
        self._steps = steps

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._steps.train_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._steps.updated()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self._steps.step_ended():
            control.should_training_stop = True


class RunSchedule(LRScheduler):
    """Schedule the rates of `optimizer.learning_rate`, starting at optimizer step `first` (counted from 0)."""

    def __init__(self, optimizer: torch.optim.Optimizer, train: TrainSpec, first: int, total: int) -> None:
        self._train, self._total = train, total
        for group in optimizer.param_groups:
            group["initial_lr"] = train.lr
        super().__init__(optimizer, last_epoch=first - 1)  # the constructor makes one step

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the same rate for all groups."""
        rate = learning_rate(self._train, self.last_epoch, self._total)
        return [rate for _ in self.optimizer.param_groups]


def check_wrapped(trainer: Any, world: DistContext, find_unused_parameters: bool) -> None:
    """Check that the Trainer sees all ranks and that its model averages gradients over them.

    Raises:
        ProofFailed: it trains alone, on another device, or without the DDP wrapper.
    """
    found = trainer.accelerator.num_processes
    if found != world.size:
        raise ProofFailed(
            f"hf_trainer: Accelerate sees {found} processes, the run has {world.size} ranks: this rank would train alone on all rows"
        )
    ours, its = world.device, trainer.args.device
    if ours.type != its.type or (ours.type == "cuda" and ours.index != its.index):
        raise ProofFailed(f"hf_trainer: the Trainer computes on {its}, this rank on {ours}")
    if world.size == 1:
        return
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        raise ProofFailed(
            f"hf_trainer: the Trainer left the model as a {type(wrapped).__name__} instead of wrapping it in DistributedDataParallel: "
            "the ranks' weights would diverge silently (on CPUs it wraps only with use_cpu)"
        )
    size = dist.get_world_size(wrapped.process_group)
    if size != world.size:
        raise ProofFailed(f"hf_trainer: the wrapper averages over {size} of {world.size} ranks")
    if bool(wrapped.find_unused_parameters) != find_unused_parameters:
        raise ProofFailed(
            f"hf_trainer: the wrapper has find_unused_parameters={wrapped.find_unused_parameters}, expected {find_unused_parameters}"
        )


def bucket_bytes(wrapped: Any) -> int:
    """Return the bytes of the wrapper's buckets beside the gradients: 0 if gradients are views into the buckets."""
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.gradient_as_bucket_view:
        return 0
    sizes = wrapped._get_ddp_logging_data().get("bucket_sizes", "")
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def check_norms(rank: int, agreed: ReducedStep) -> None:
    """Check that this rank's gradient norm equals the mean over ranks, as it must after averaging.

    Both come with each step's reduced metrics, so that the check neither communicates nor waits for the device.

    Raises:
        ProofFailed: the norms differ, so the weights diverge.
    """
    own = agreed.own_grad_norm
    if abs(own - agreed.grad_norm) > NORM_TOLERANCE * max(abs(agreed.grad_norm), torch.finfo(torch.float32).tiny):
        raise ProofFailed(
            f"step {agreed.step + 1}: rank {rank} has a gradient norm of {own:.8g}, the mean over ranks is {agreed.grad_norm:.8g}: "
            "gradients are not averaged over the ranks, so the weights diverge"
        )


class TrainerLoop:
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
        self._order, self._make_batch = rows.order, rows.make_batch
        self._watcher = watcher or NullStepWatcher()
        self._running = TrainerStep(world.device, self._watcher.part)
        self._step_metrics = StepMetrics(
            world,
            rows,
            plan,
            events,
            self._running.clock,
            lambda work, agreed: check_norms(world.rank, agreed),
        )
        self._watcher.attach(self._step_metrics.quiet)
        self._running.clock.follow(strategy.module)
        self._done = plan.first_step

    def run(self) -> LoopOutcome:
        """Run all steps; return when every rank has done the same number of steps.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the named step.
            ProofFailed: the Trainer does not train as a rank of this run, or the weights diverged.
        """
        if self._plan.first_step < self._plan.total_steps:
            self._random = distributed.rng_state()
            self._began = time.perf_counter()
            with tempfile.TemporaryDirectory(
                prefix="allranks-trainer-"
            ) as folder:  # required by the Trainer, which writes nothing there
                self._trainer = self._made(folder)
                try:
                    self._trainer.train()
                finally:
                    self._running.abandon()
                # Only after success: freeing memory waits for the device, which may be in a collective that a failed rank never joins.
                self._trainer.accelerator.free_memory()
                del self._trainer
                gc.collect()  # the Trainer has reference cycles, which would keep the wrapper's buckets alive
            self._step_metrics.drain()
            prove_weights(self._world, self._strategy.module, f"after step {self._done}")
        return LoopOutcome(self._done, stopped=self._done < self._plan.total_steps)

    def _made(self, folder: str) -> RanksTrainer:
        plan, strategy = self._plan, self._strategy
        first, total = plan.first_step, plan.total_steps
        micro = self._order.micro_batches(0)
        given = trainer_arguments.complete_arguments(
            strategy.args,
            trainer_arguments.TrainerExpectations(
                train=msgspec.structs.replace(plan.train, max_grad_norm=strategy.clip_norm),
                micro_batch_size=len(micro[0]),
                grad_accum=len(micro),
                world_size=self._world.size,
                device=self._world.device.type,
                find_unused_parameters=strategy.find_unused_parameters,
                backend=dist.get_backend(self._world.group),
                max_steps=plan.train.max_steps,
            ),
        )
        self._feed = RowDataset(self._order, self._make_batch, first, total)
        define_cpu_set_device()
        return RanksTrainer(
            feed=loader(self._feed),
            running=self._running,
            ranks=self._world.size,
            begin=self._step_begins,
            model=strategy.module,
            args=transformers.TrainingArguments(**{**given, "output_dir": folder, "max_steps": total - first}),
            optimizers=(strategy.optimizer, RunSchedule(strategy.optimizer, plan.train, first, total)),
            callbacks=[MetricsCallback(self)],
        )

    def train_begins(self) -> None:
        """Check the wrapped model and fix its bucket layout before training."""
        check_wrapped(self._trainer, self._world, self._strategy.find_unused_parameters)
        if self._world.size > 1:
            self._strategy.bucket_bytes = bucket_bytes(self._trainer.model_wrapped)
            if self._plan.first_step:
                self._warm_up()
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

    def _warm_up(self) -> None:
        """Run one forward and backward pass and discard the gradients, in a run that continues another.

        DDP rebuilds its buckets after the first backward pass, and with three or more ranks the sums depend on the layout.
        Without this the first step after a resume would be rounded differently.
        """
        model: Any = self._trainer.model_wrapped
        model.train()
        (model(self._feed.peek().batch) * 0.0).backward()
        self._strategy.optimizer.zero_grad(set_to_none=True)

    def _step_begins(self, done: int) -> None:
        step = self._plan.first_step + done
        self._watcher.step_begins(step)
        self._running.begin(step, self._step_metrics.trained(step), self._strategy.optimizer.param_groups[0]["lr"])

    def updated(self) -> None:
        """Record that the optimizer has made its step."""
        self._running.leave("optimizer")

    def step_ended(self) -> bool:
        """Record the step, run the callbacks that are due, and return whether all ranks must stop."""
        work = self._running.end()
        step = work.step
        if step == self._plan.first_step:
            prove_fed(self._world, self._order, step, self._running.fed)
        check_rows(self._order, step, self._running.fed)
        with self._watcher.part("control"):
            agreed = self._step_metrics.exchange(work)
        if self._watcher.step_ends(step):
            self._running.clock.pause()
        self._done = step + 1
        stop = self._step_metrics.process_reduced(agreed)
        if self._step_metrics.callbacks_due(self._done, stop):
            stop = self._step_metrics.run_callbacks(self._done, stop)
            self._running.clock.pause()
        elif self._done == self._plan.total_steps:
            self._step_metrics.count_queued_work()  # before the Trainer's own end
        return stop


def _require_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise EnvironmentNotAble(
            f"hf_trainer needs Accelerate, which cannot be imported: {str(error).splitlines()[0]}; "
            "pip install 'allranks[train]', or use pytorch_ddp"
        ) from None


class HFTrainer(ReplicatedWeights):
    """Hold model, optimizer and state for a `TrainerLoop`."""

    claims_overlap = True

    def __init__(self, find_unused_parameters: bool, args: dict[str, Any] | None) -> None:
        _require_accelerate()  # before the model is loaded
        self.find_unused_parameters, self.args = find_unused_parameters, args
        self.engine_config = args

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)
        self.clip_norm = clip_norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", None, sizes.trained_bytes)]
