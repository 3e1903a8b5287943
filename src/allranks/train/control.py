"""One small all-reduce beside each optimizer step, which nobody waits for.

It carries what the ranks must agree on (stop? was anything not finite?) and, on logging steps, the step's loss. It
runs on the control group (gloo, CPU) while the next step computes, and is read at that step's edge: all ranks
read the same numbers at the same step, so they take the same decision.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from allranks.train.world import World


@dataclass(frozen=True)
class Agreed:
    """What all ranks together say about one step (numbered from 0). ``loss_sum`` is in nats over ``trained`` tokens;
    ``own_loss_sum`` is what this rank put in."""

    step: int
    loss_sum: float
    own_loss_sum: float
    grad_norm: float
    stop: bool
    bad_ranks: int


class Control:
    """Starts the reduction of a step, and hands out the latest one that has been started before."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copied: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        self._pending: tuple[int, dist.Work | None, torch.Tensor, float] | None = None

    def start(self, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor, *, stop: bool) -> None:
        """Begin the reduction for `step`. Both tensors are float32 scalars on the device.

        On a GPU the numbers are first copied without waiting, and their reduction begins at the next step's edge,
        when they have long arrived: the host never waits for the step that it has just queued.
        """
        local = torch.stack([loss_sum.detach().double(), grad_norm.detach().double() / self._world.size])
        vector = torch.zeros(4, dtype=torch.float64, pin_memory=local.is_cuda)
        vector[2] = float(stop)
        vector[:2].copy_(local, non_blocking=True)
        if not local.is_cuda:
            self._reduce(step, vector)
            return
        arrived = torch.cuda.Event()
        arrived.record()
        earlier, self._copied = self._copied, (step, vector, arrived)
        self._reduce_copied(earlier)

    def _reduce_copied(self, copied: tuple[int, torch.Tensor, torch.cuda.Event] | None) -> None:
        if copied is not None:
            step, vector, arrived = copied
            arrived.synchronize()
            self._reduce(step, vector)

    def _reduce(self, step: int, vector: torch.Tensor) -> None:
        vector[3] = float(not bool(torch.isfinite(vector[:2]).all()))
        own = float(vector[0])
        work = dist.all_reduce(vector, group=self._world.control, async_op=True) if self._world.size > 1 else None
        self._pending = (step, work, vector, own)

    def quiet(self) -> None:
        """Wait for the reduction that is under way on this rank; its numbers stay to be read."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].wait()

    def finish(self) -> Agreed | None:
        """The numbers of the step whose reduction is under way, or None."""
        if self._pending is None:
            return None
        step, work, vector, own = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        loss, norm, stop, bad = vector.tolist()
        return Agreed(step=step, loss_sum=loss, own_loss_sum=own, grad_norm=norm, stop=stop > 0, bad_ranks=int(bad))

    def drain(self) -> list[Agreed]:
        """Everything that is still under way, oldest first. All ranks call at the same edge."""
        found = [self.finish()]
        copied, self._copied = self._copied, None
        self._reduce_copied(copied)
        found.append(self.finish())
        return [agreed for agreed in found if agreed is not None]


class StopRequest:
    """Set by SIGTERM or SIGUSR1; heeded at the edge of a step, by all ranks together."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason: str | None = None
        self.at: float | None = None

    def ask(self, reason: str) -> None:
        """Ask for a stop. Safe within a signal handler."""
        self.reason, self.at = reason, time.time()
        self._event.set()

    @property
    def asked(self) -> bool:
        return self._event.is_set()
