"""Copies in host memory for optimizers whose state is there: pinned, so that all of them are in flight together."""

from __future__ import annotations

import torch


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory. From a GPU it is pinned and asynchronous: call `wait_for_host_copies` before it is read."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return made.copy_(tensor, non_blocking=True)


def wait_for_host_copies(device: torch.device | None) -> None:
    """Wait once for all copies that were started from a device."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
