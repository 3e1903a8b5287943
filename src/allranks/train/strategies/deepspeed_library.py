"""DeepSpeed itself: imported late and quietly, and asked for its accelerator."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from allranks.errors import EnvironmentNotAble

_CURE = f"it may be for another torch than {torch.__version__}: pip install --upgrade 'deepspeed>=0.16', or take zero1, zero2, zero3"


def load_deepspeed() -> Any:
    """Import DeepSpeed; where torch sees no GPU, for the CPU and without anything compiled.

    Raises:
        EnvironmentNotAble: it is not installed, or does not work with this torch.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with quiet():
            deepspeed: Any = import_module("deepspeed")
    except ImportError as error:
        raise EnvironmentNotAble(
            "DeepSpeed is not installed here; pip install 'allranks[deepspeed]', or take zero1, zero2, zero3 or pytorch_zero3"
            if error.name == "deepspeed"
            else f"DeepSpeed cannot be imported: {_first_line(error)}; {_CURE}"
        ) from None
    except (OSError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
        raise EnvironmentNotAble(
            f"DeepSpeed cannot be imported: {type(error).__name__}: {_first_line(error)}; {_CURE}"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    for name in (
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):  # torch 2.13 tells of their new names at every call
        warnings.filterwarnings("ignore", rf".*{name}. is deprecated", FutureWarning)
    if (
        _accelerator() == "cpu"
    ):  # a shared-memory all-reduce would be compiled at the start wherever there is a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def require_accelerator(device: torch.device) -> None:
    """Raises:
    EnvironmentNotAble: DeepSpeed works on another kind of device than the model is on; it chooses once a process.
    """
    if _accelerator() != device.type:
        raise EnvironmentNotAble(
            f"DeepSpeed took {_accelerator()} as its accelerator, but the model is on {device.type}; set cluster.env: "
            f"{{DS_ACCELERATOR: {device.type}}}"
        )


def _accelerator() -> str:
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    return str(accelerator.device_name())


@contextmanager
def quiet() -> Iterator[None]:
    """Without what DeepSpeed tells of itself at every start."""
    logger = logging.getLogger("DeepSpeed")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
