"""Plants an end into the ranks of a test's run, as ``PLANTED=HOW[:RANK]`` says; without a rank, into all of them."""

import os
import time


def nan_evaluation() -> None:
    """The loss of every evaluation is NaN."""
    import torch

    from allranks.train.evaluation import Evaluator

    plain = Evaluator._score
    Evaluator._score = lambda self, rows: plain(self, rows) * torch.tensor([float("nan"), 1, 1, 1])


def fail_beside_a_collective() -> None:
    """The fourth batch raises while the peers wait in a collective, and leaving the process group takes for ever.

    NCCL's destroy_process_group waits for the peers; gloo's does not, so a sleep takes its place.
    """
    import torch.distributed as dist

    from allranks.train import tasks

    whole, calls = tasks.collate, 0

    def planted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("planted failure")
        return whole(*args)

    def destroy(*args: object) -> None:
        while True:
            time.sleep(3600)

    tasks.collate = planted
    dist.destroy_process_group = destroy


_how, _, _rank = os.environ.get("PLANTED", "").partition(":")
if _how and os.environ.get("RANK", "none") == (_rank or os.environ.get("RANK")):
    globals()[_how]()
