"""Is a strategy right? Its weights against those of one process, its traffic, its memory, its overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from allranks.train import strategies
from allranks.train.compare.bench import Bench
from allranks.train.compare.memory import Held
from allranks.train.compare.recorder import Recorder
from allranks.train.compare.reference import reference_weights
from allranks.train.compare.unsynchronised import Unsynchronised
from allranks.train.compare.window import Window
from allranks.train.losses import LossModel
from allranks.train.optim import adamw
from allranks.train.parity import norm_error, update_error
from allranks.train.strategies.contract import Strategy
from allranks.train.strategies.traffic import Sizes, Traffic

VERIFY_STEPS = 6  # one plain, two recorded, three profiled


class Verifier:
    """Compares with a reference that rank 0 computes at the start. All ranks call the same methods."""

    def __init__(self, bench: Bench, model: LossModel) -> None:
        self._bench, self._world = bench, bench.world
        self.sizes = Sizes(tuple(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
        self._reference_file = bench.folder / "reference.safetensors"
        self._start_file = bench.folder / "start.safetensors"
        self.reference_s = 0.0

    def reference(self, model: LossModel) -> None:
        """Rank 0 computes; the others wait on the control group."""
        began, bench = time.perf_counter(), self._bench
        if self._world.is_first:
            bench.folder.mkdir(parents=True, exist_ok=True)
            save_file(_trained(model), self._start_file)
            whole, self._norms = reference_weights(
                model,
                adamw(bench.spec.train),
                bench.orders,
                bench.data.train,
                bench.make_batch,
                VERIFY_STEPS,
                bench.spec.train.clip_norm,
                bench.rates(VERIFY_STEPS),
            )
            save_file({k: v.contiguous().clone() for k, v in whole.items()}, self._reference_file)
        dist.barrier(group=self._world.control)
        self.reference_s = time.perf_counter() - began

    def negative_control(self) -> dict[str, Any]:
        """The same without synchronisation must be seen to be wrong, or the parity gate says nothing."""
        strategy = Unsynchronised()
        model = self._bench.setup(strategy)
        steps, _ = self._bench.train(strategy, VERIFY_STEPS, self._bench.log("negative-control", 0), None)
        return self._parity(strategy, model, steps)

    def verify(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """What a strategy did in `VERIFY_STEPS` steps, beside what it says of itself."""
        bench = self._bench
        strategy = strategies.create(name, options)
        model = bench.setup(strategy)
        held, recorder = Held(strategy, model), Recorder(1, 2)
        trace = bench.folder / name / "traces" / f"rank{self._world.rank}.json.gz"
        window = Window(3, VERIFY_STEPS - 1, self._world.device, trace)
        watcher = _Both(recorder, window, held)
        steps, work = bench.train(strategy, VERIFY_STEPS, bench.log(name, 0), watcher, held, strategies.loop_of(name))
        expected: list[Traffic] = strategy.traffic(self.sizes, self._world.size, bench.batch.grad_accum)
        profiled = window.figures()
        new = profiled.pop("peak_new_bytes")
        found = {
            "work": vars(work),
            "losses": [e["loss"] for e in steps],
            "claims_overlap": strategy.claims_overlap,
            "expected": [vars(t) for t in expected],
            "measured": recorder.totals(),
            "memory": {
                "weights_bytes": held.weights(),
                "gradients_bytes": held.gradients,
                "optimizer_bytes": held.optimizer_state(),
                "peak_bytes": window.peak_bytes or window.before_bytes + new,
            },
            "window": profiled,
        }
        held.remove()
        return found | self._parity(strategy, model, steps)

    def _parity(self, strategy: Strategy, model: LossModel, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """How far weights and norms are from the reference (rank 0), and the ranks from each other."""
        found: dict[str, Any] = {}
        whole = strategy.weights(trained_only=True)
        if self._world.is_first:
            found["error"] = update_error(whole, load_file(self._reference_file), load_file(self._start_file))
            found["norm_error"] = norm_error([e["grad_norm"] for e in steps], self._norms)
        if strategy.replicated:
            mine = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(self._world.size)]
            dist.all_gather(every, mine, group=self._world.control)
            found["ranks_differ"] = max(float((t - mine).abs().max()) for t in every)
        return found


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in model.named_parameters() if p.requires_grad}


class _Both:
    """A recorder for some steps and a profiler for later ones."""

    def __init__(self, recorder: Recorder, window: Window, held: Held) -> None:
        self._recorder, self._window, self._held = recorder, window, held

    def attach(self, quiet: Callable[[], None]) -> None:
        self._window.attach(quiet)

    def step_begins(self, step: int) -> None:
        self._recorder.step_begins(step)
        if step == self._window.first:
            self._window.before_bytes = self._held.kept_between_steps()
        self._window.step_begins(step)

    def part(self, name: str) -> Any:
        return self._recorder.part(name) if self._recorder.inside else self._window.part(name)

    def step_ends(self, step: int) -> bool:
        self._recorder.step_ends(step)
        return self._window.step_ends(step)

    def close(self) -> None:
        self._recorder.close()
