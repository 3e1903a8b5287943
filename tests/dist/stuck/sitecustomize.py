"""Makes ranks of a test's run stand still or fail at their CALL-th batch, as ``STUCK=HOW:RANK:CALL;...`` says."""

import os
import signal
import time


def sleep_forever() -> None:
    while True:
        time.sleep(3600)


def spin_forever() -> None:
    while True:
        pass


def sleep_a_while() -> None:
    time.sleep(float(os.environ["STUCK_S"]))


def burn_a_while() -> None:
    """CPU time, however long that takes on a loaded machine."""
    until = time.thread_time() + float(os.environ["STUCK_S"])
    while time.thread_time() < until:
        pass


def killed() -> None:
    """By SIGKILL, in the attempts that ``STUCK_ATTEMPTS`` lists."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] in os.environ["STUCK_ATTEMPTS"].split(","):
        os.kill(os.getpid(), signal.SIGKILL)


def flip_trained_weight() -> None:
    _flip(trained=True)


def flip_frozen_weight() -> None:
    _flip(trained=False)


def _flip(*, trained: bool) -> None:
    """One bit of one weight changes before the seventh step, in the attempts that ``STUCK_ATTEMPTS`` lists."""
    import torch

    from allranks.train.loop import TrainingLoop

    plain = TrainingLoop.train_step

    def train_step(self, step, feed):
        if step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] in os.environ["STUCK_ATTEMPTS"].split(","):
            *_, weight = (p for p in self._strategy.module.parameters() if p.requires_grad == trained)
            weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        return plain(self, step, feed)

    TrainingLoop.train_step = train_step


def slow_backward() -> None:
    """From now on backward passes that begin with a sleep, within autograd."""
    import torch

    plain = torch.Tensor.backward
    if hasattr(plain, "planted"):
        return

    def backward(loss, *args, **more):
        loss.register_hook(lambda gradient: sleep_a_while())
        return plain(loss, *args, **more)

    backward.planted = True
    torch.Tensor.backward = backward


def slow_everywhere() -> None:
    """Slow batches; and from then on evaluations and checkpoints that take longer than a step may be silent."""
    from allranks.train.checkpoint.saver import Saver
    from allranks.train.evaluation import Evaluator

    sleep_a_while()
    for owner, name in ((Saver, "save"), (Evaluator, "run")):
        method = getattr(owner, name)
        if not hasattr(method, "slow"):
            setattr(owner, name, _slow(method))


def _slow(method):
    def slow(*args, **more):
        time.sleep(3 * float(os.environ["STUCK_S"]))
        return method(*args, **more)

    slow.slow = True
    return slow


def other_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.zeros(3))


def hold_the_interpreter() -> None:
    """A call into C that does not let go of the interpreter, as a bad extension makes it."""
    import ctypes

    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2):  # a sleep would end with the first signal
        libc.pthread_mutex_lock(mutex)


def nan_evaluation() -> None:
    """From now on the loss of every evaluation is NaN."""
    import torch

    from allranks.train.evaluation import Evaluator

    plain = Evaluator._score
    Evaluator._score = lambda self, rows: plain(self, rows) * torch.tensor([float("nan"), 1, 1, 1])


def fail_beside_a_collective() -> None:
    """While the peers wait in a collective, and leaving the process group takes for ever, as that of NCCL does."""
    import torch.distributed as dist

    dist.destroy_process_group = lambda *args: sleep_forever()
    raise RuntimeError("planted failure")


def _plant(how: str, rank: int, call: int) -> None:
    from allranks.train import tasks

    whole, calls = tasks.collate, 0

    def planted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call or (call < 0 and calls >= -call):
            globals()[how]()
        return whole(*args)

    tasks.collate = planted


for _what in os.environ["STUCK"].split(";") if os.environ.get("STUCK") and "RANK" in os.environ else ():
    _how, _rank, _call = _what.split(":")
    if int(os.environ["RANK"]) == int(_rank):
        _plant(_how, int(_rank), int(_call))
