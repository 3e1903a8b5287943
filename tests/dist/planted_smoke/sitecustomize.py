"""Faults in the ranks of a test's run: ``SMOKE_PLANT`` names one. Nothing else of the run knows of them."""

import os
import sys

NCCL = "n1:42:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"


def missing_rank() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def saved_by_rank_0_alone() -> None:
    from allranks.train.checkpoint.saver import CheckpointSchedule

    if os.environ["RANK"] != "0":
        CheckpointSchedule.save = lambda self, *args, **more: None


def float32_inputs() -> None:
    import torch

    from allranks.train import tasks

    usual = tasks.noise_batch
    tasks.noise_batch = lambda *args, dtype, **more: usual(*args, dtype=torch.float32, **more)


def gradients_not_synchronised() -> None:
    from allranks.train.strategies.data_parallel import PyTorchDDP

    usual = PyTorchDDP.setup

    def setup(self, *args):
        usual(self, *args)
        self.module.require_backward_grad_sync = False

    PyTorchDDP.setup = setup


if "allranks.launch.rank" in sys.orig_argv and os.environ.get("SMOKE_PLANT"):
    globals()[os.environ["SMOKE_PLANT"]]()
