"""Faults for runs of tests/gpu, as ``GPU_PLANT=HOW:RANK:STEP;...`` says. On the path of a test's ranks."""

import os


def nan_loss(loss):
    return loss * float("nan")


def spin_on_the_device(loss):
    """A kernel without end: the host waits for it, at 100 % of a core, as a rank does whose collective never ends."""
    import torch

    while True:
        if loss.is_cuda:
            torch.cuda._sleep(1_000_000_000)
            torch.cuda.synchronize()


def read_a_value(loss):
    """What a step must not do on a GPU: the host waits until everything that was queued is done."""
    loss.item()
    return loss


def _plant(how, call):
    """Change the loss of one step; forward passes before the first step, such as a warm-up, do not count."""
    from allranks.train import loop
    from allranks.train.models import losses

    plain_step, plain_forward, steps = loop.TrainingLoop.train_step, losses.LossModel.forward, 0
    inside = False

    def step(self, *args):
        nonlocal steps, inside
        steps, inside = steps + 1, True
        try:
            return plain_step(self, *args)
        finally:
            inside = False

    def forward(self, *args, **more):
        loss = plain_forward(self, *args, **more)
        return globals()[how](loss) if inside and steps == call else loss

    loop.TrainingLoop.train_step, losses.LossModel.forward = step, forward


def _refuse_host_syncs(first):
    """From the step `first` on, whatever blocks the host within a step raises; evaluations and checkpoints may."""
    import torch

    from allranks.train import loop

    plain, steps = loop.TrainingLoop.train_step, 0

    def step(self, *args):
        nonlocal steps
        steps += 1
        if steps < first:
            return plain(self, *args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    loop.TrainingLoop.train_step = step


if "RANK" in os.environ:
    for _what in filter(None, os.environ.get("GPU_PLANT", "").split(";")):
        _how, _rank, _step = _what.split(":")
        if int(os.environ["RANK"]) == int(_rank):
            _refuse_host_syncs(int(_step)) if _how == "no_host_syncs" else _plant(_how, int(_step))
