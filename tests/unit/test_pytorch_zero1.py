"""What torch's ZeroRedundancyOptimizer cannot train is refused by name before anything is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from allranks.errors import SpecError
from allranks.train.strategies.data_parallel import PyTorchZero1


def test_two_dtypes_are_refused_with_the_names_of_both() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2).bfloat16(), "adapter": nn.Linear(2, 2)})
    nobody: Any = None  # no rank is asked before
    with pytest.raises(SpecError, match=r"adapter.weight is torch.float32, head.weight is torch.bfloat16.*pytorch_ddp"):
        PyTorchZero1(25, False).setup(model, nobody, nobody, None)
