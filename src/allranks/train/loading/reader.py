"""One rank of the world reads; all ranks hear at the same place what came of it.

One of the world, not one a node: files are read once wherever they lie, only one node needs to see them, and each rank
is sent its part alone, so that what leaves the reader is at most one copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist

from allranks import errors
from allranks.errors import AllranksError, EnvironmentNotAble
from allranks.train.data.tokenizer import first_line
from allranks.train.world import World

READER = 0
BUSY_S = 5.0  # how often the reader says that it is still at work: far below any timeout of collectives
_BUSY, _DONE, _RESULT, _ERROR = range(4)


def reader_does(world: World, action: Callable[[], Any]) -> Any:
    """Let the reader do what may take long, such as fetching files; all ranks get its (small) result.

    Raises:
        AllranksError: on every rank, what the reader raised.
    """
    if world.size == 1:
        return action()
    if world.rank != READER:
        while int(_word(world, _BUSY)) == _BUSY:
            pass
        return agree(world, None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while not wait([future], BUSY_S).done:
            _word(world, _BUSY)
        _word(world, _DONE)
    problem = future.exception()
    return agree(world, problem, None if problem else future.result())


def agree(world: World, problem: BaseException | None, result: Any = None) -> Any:
    """The reader's result on all ranks; or its problem, raised on all. Every rank calls; only the reader's values count."""
    error = _named(problem)
    if world.size > 1:
        told = int(_word(world, _ERROR if error else _DONE if result is None else _RESULT))
        if told == _DONE:
            return None
        box: list[Any] = [result if error is None else (type(error).__name__, str(error))]
        dist.broadcast_object_list(box, src=READER, group=world.control)
        result = box[0]
        if told == _ERROR and error is None:
            kind, text = result
            error = getattr(errors, kind, EnvironmentNotAble)(text)
    if error is not None:
        raise error
    return result


def _named(problem: BaseException | None) -> AllranksError | None:
    if problem is None or isinstance(problem, AllranksError):
        return problem
    return EnvironmentNotAble(f"rank {READER}, which reads the model: {type(problem).__name__}: {first_line(problem)}")


def _word(world: World, value: int) -> torch.Tensor:
    word = torch.tensor(value)
    dist.broadcast(word, src=READER, group=world.control)
    return word
