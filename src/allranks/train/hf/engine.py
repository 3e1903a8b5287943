"""The engine: in place of `Loop`, the Trainer runs the steps; data, loss, records, edges and stops are the same."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from typing import Any

import accelerate
import msgspec
import torch
import torch.distributed as dist
import transformers

from allranks.observe.events import EventLog
from allranks.train import rng
from allranks.train.control import StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.data.prepared import TokenSet
from allranks.train.hf import arguments
from allranks.train.hf.callbacks import Records
from allranks.train.hf.checks import bucket_bytes, check_norms, check_wrapped
from allranks.train.hf.feed import Feed, check_rows, loader, prove_fed
from allranks.train.hf.running import Running
from allranks.train.hf.schedule import Schedule
from allranks.train.hf.strategy import HFTrainer
from allranks.train.hf.trainer import RanksTrainer
from allranks.train.ledger import Ledger, Outcome, Plan
from allranks.train.proof import prove_weights
from allranks.train.watching import StepWatcher, Unwatched
from allranks.train.world import World


class TrainerLoop:
    """Runs optimizer steps in a Trainer until the plan is done or a stop is agreed on."""

    def __init__(
        self,
        world: World,
        strategy: HFTrainer,
        order: Order,
        tokens: TokenSet,
        make_batch: Callable[[Rows], Batch],
        plan: Plan,
        events: EventLog,
        stop: StopRequest,
        watcher: StepWatcher | None = None,
    ) -> None:
        self._world, self._strategy, self._order, self._plan, self._events = world, strategy, order, plan, events
        self._make_batch = make_batch
        self._watcher = watcher or Unwatched()
        self._ledger = Ledger(
            world, order, tokens, plan, events, stop, check=lambda work, agreed: check_norms(world.rank, work, agreed)
        )
        self._watcher.attach(self._ledger.quiet)
        self._running = Running(world.device, self._watcher.part)
        self._running.clock.follow(strategy.module)
        self._done = plan.first_step

    def run(self) -> Outcome:
        """All steps; returns at an edge where every rank has done equally many.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the step that it names.
            ProofFailed: the Trainer does not train as one of these ranks, or their weights came apart.
        """
        if self._plan.first_step < self._plan.total_steps:
            self._random = rng.rng_state()
            self._began = time.perf_counter()
            with tempfile.TemporaryDirectory(
                prefix="allranks-trainer-"
            ) as folder:  # it wants one, and leaves nothing there
                self._trainer = self._made(folder)
                try:
                    self._trainer.train()
                finally:
                    self._running.abandon()
                    self._trainer.accelerator.free_memory()
                    del self._trainer
                    gc.collect()  # its parts refer to each other: without this the wrapper's buckets would stay
            self._ledger.drain()
            prove_weights(self._world, self._strategy.module, f"after step {self._done}")
        return Outcome(self._done, stopped=self._done < self._plan.total_steps)

    def _made(self, folder: str) -> RanksTrainer:
        plan, strategy = self._plan, self._strategy
        first, total = plan.first_step, plan.total_steps
        micro = self._order.micro_batches(0)
        given = arguments.completed(
            strategy.args,
            arguments.Asked(
                train=msgspec.structs.replace(plan.train, clip_norm=strategy.clip_norm),
                micro_batch_size=len(micro[0]),
                grad_accum=len(micro),
                world_size=self._world.size,
                device=self._world.device.type,
                find_unused_parameters=strategy.find_unused_parameters,
                backend=dist.get_backend(self._world.group),
                max_steps=plan.train.max_steps,
            ),
        )
        self._feed = Feed(self._order, self._make_batch, first, total)
        _let_set_device_be_called()
        return RanksTrainer(
            feed=loader(self._feed),
            running=self._running,
            ranks=self._world.size,
            begin=self._step_begins,
            model=strategy.module,
            args=transformers.TrainingArguments(**{**given, "output_dir": folder, "max_steps": total - first}),
            optimizers=(strategy.optimizer, Schedule(strategy.optimizer, plan.train, first, total)),
            callbacks=[Records(self)],
        )

    def train_begins(self) -> None:
        """The model is wrapped: look at it, and settle its buckets, before anything is trained."""
        check_wrapped(self._trainer, self._world, self._strategy.find_unused_parameters)
        if self._world.size > 1:
            self._strategy.bucket_bytes = bucket_bytes(self._trainer.model_wrapped)
            self._rehearse()
        self._events.write(
            "engine",
            engine="hf_trainer",
            version=transformers.__version__,
            accelerate=accelerate.__version__,
            wrapper=type(self._trainer.model_wrapped).__name__,
            find_unused_parameters=self._strategy.find_unused_parameters,
            initialize_s=round(time.perf_counter() - self._began, 3),
        )
        rng.set_rng_state(self._random)  # the Trainer has seeded all ranks alike
        self._running.clock.pause()

    def _rehearse(self) -> None:
        """One forward and backward, thrown away: DDP lays its buckets out anew after the first backward, and from three
        ranks on sums depend on the layout. Else the first step after a resume would be rounded otherwise."""
        model: Any = self._trainer.model_wrapped
        model.train()
        (model(self._feed.peek().batch) * 0.0).backward()
        self._strategy.optimizer.zero_grad(set_to_none=True)

    def _step_begins(self, done: int) -> None:
        step = self._plan.first_step + done
        self._watcher.step_begins(step)
        self._running.begin(step, self._ledger.trained(step), self._strategy.optimizer.param_groups[0]["lr"])

    def updated(self) -> None:
        """The optimizer has made its step."""
        self._running.leave("optimizer")

    def step_ended(self) -> bool:
        """Write the step down, and do what is due after it; True if all ranks are to stop."""
        work = self._running.end()
        step = work.step
        if step == self._plan.first_step:
            prove_fed(self._world, self._order, step, self._running.fed)
        check_rows(self._order, step, self._running.fed)
        with self._watcher.part("control"):
            agreed = self._ledger.exchange(work)
        if self._watcher.step_ends(step):
            self._running.clock.pause()
        self._done = step + 1
        stop = self._ledger.heed(agreed)
        if self._ledger.is_edge(self._done, stop):
            stop = self._ledger.edge(self._done, stop)
            self._running.clock.pause()
        return stop


def _let_set_device_be_called() -> None:
    """Accelerate calls it for ranks on CPUs as it does for GPUs; a torch without it has nothing to set there."""
    if not hasattr(torch.cpu, "set_device"):
        torch.cpu.set_device = lambda device: None
