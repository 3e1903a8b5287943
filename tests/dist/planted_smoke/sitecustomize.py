"""Faults in the ranks of a test's run: ``SMOKE_PLANT`` names one. Nothing else of the run knows of them."""

from __future__ import annotations

import os
import sys

NCCL = "n1:42:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"


def missing_rank() -> None:
    """Rank 1 is gone before it begins."""
    if os.environ["RANK"] == "1":
        os._exit(3)


def loss_not_aggregated() -> None:
    """Each rank takes its own loss for everybody's."""
    from allranks.train.step_metrics import AsyncStepReduction

    usual = AsyncStepReduction._reduce

    def reduce(self, step, vector):
        own = float(vector[0])
        usual(self, step, vector)
        self._pending[1].wait()
        vector[0] = own

    AsyncStepReduction._reduce = reduce


def saved_by_rank_0_alone() -> None:
    from allranks.train.checkpoint.saver import CheckpointSchedule

    if os.environ["RANK"] != "0":
        CheckpointSchedule.save = lambda self, *args, **more: None


def wrong_batch_product() -> None:
    """Rank 1 trains a row less than was planned."""
    from allranks.train import tasks

    usual = tasks.noise_batch
    if os.environ["RANK"] == "1":
        tasks.noise_batch = lambda data, tokens, rows, **more: usual(data, tokens, rows[:-1], **more)


def float32_inputs() -> None:
    """Whatever the model's dtype."""
    import torch

    from allranks.train import tasks

    usual = tasks.noise_batch
    tasks.noise_batch = lambda data, tokens, rows, width, dtype: usual(
        data, tokens, rows, width=width, dtype=torch.float32
    )


def other_transport() -> None:
    """NCCL says that it goes by sockets (there is none here: its line is put into the rank's log)."""
    from allranks.train import worker

    usual = worker.run_rank

    def work(run, attempt, spec):
        os.write(1, NCCL.encode())
        return usual(run, attempt, spec)

    worker.run_rank = work


def gradients_not_synchronised() -> None:
    from allranks.train.strategies.data_parallel import PyTorchDDP

    usual = PyTorchDDP.setup

    def setup(self, *args):
        usual(self, *args)
        self.module.require_backward_grad_sync = False

    PyTorchDDP.setup = setup


if "allranks.launch.rank" in sys.orig_argv and os.environ.get("SMOKE_PLANT"):
    globals()[os.environ["SMOKE_PLANT"]]()
