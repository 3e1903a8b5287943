"""State for each collective whether the sizes of its tensors must agree between ranks.

The names are those that torch records: in flight-recorder dumps (``nccl:_all_gather_base``), in traces
(``c10d::_allgather_base_``) and in messages of the watchdog (``_ALLGATHER_BASE``). `size_rule` looks a name up exactly,
after removing the prefix of the backend, ranks of a send, and differences in case and underscores.
"""

from __future__ import annotations

import re

from msgspec import Struct


class SizeRule(Struct, frozen=True):
    """Whether the sizes of a collective must be equal on all ranks.

    ``inputs`` and ``outputs``: equal sizes are required. ``called_uneven``: the call also accepts unequal sizes, but
    then NCCL runs and records another operation (``ALLGATHER_coalesced``), and Gloo refuses it. A trace shows the call;
    a flight recorder and the watchdog show the operation.
    """

    inputs: bool
    outputs: bool
    called_uneven: bool = False

    @property
    def even_calls(self) -> bool:
        """Return whether all calls of this name move the same number of bytes on all ranks."""
        return self.inputs and self.outputs and not self.called_uneven


_NAMES: tuple[tuple[SizeRule, str], ...] = (
    # as torch's analyzer of flight recorders compares them (torch/distributed/flight_recorder, Op.match)
    (
        SizeRule(inputs=True, outputs=True),
        "all_reduce all_reduce_barrier allreduce_coalesced sparse_all_reduce allreduce_sparse barrier "
        "broadcast _broadcast_oop reduce _reduce_oop all_gather_single all_gather_into_tensor "
        "all_gather_into_tensor_coalesced all_gather_into_tensor_out _all_gather_base reduce_scatter_single "
        "reduce_scatter_tensor reduce_scatter_tensor_coalesced _reduce_scatter_base",
    ),
    # ProcessGroupNCCL.cpp decides by check_same_size between this operation and a coalesced one
    (SizeRule(inputs=True, outputs=True, called_uneven=True), "all_gather reduce_scatter"),
    # an entry without sizes of its own
    (SizeRule(inputs=False, outputs=False), "allgather_coalesced reduce_scatter_coalesced coalesced"),
    # of torchcomms: one list of sizes, by rank, that is the same on all ranks
    (SizeRule(inputs=False, outputs=True), "all_gather_v"),
    (SizeRule(inputs=True, outputs=False), "reduce_scatter_v"),
    # only the root has outputs, or inputs
    (SizeRule(inputs=True, outputs=False), "gather"),
    (SizeRule(inputs=False, outputs=True), "scatter"),
    # each pair of ranks has its own size
    (
        SizeRule(inputs=False, outputs=False),
        "all_to_all all_to_all_single alltoall_base all_to_allv all_to_all_v_single",
    ),
    (SizeRule(inputs=False, outputs=False), "send recv recv_any_source sendrecv"),
)
"""The operations of each rule."""
_SEPARATORS = re.compile(r"[^a-z0-9]")


def _key(name: str) -> str:
    operation = name.rpartition(":")[2].split(" ", 1)[0]
    return _SEPARATORS.sub("", operation.lower())


_BY_KEY = {_key(name): rule for rule, names in _NAMES for name in names.split()}


def size_rule(operation: str) -> SizeRule | None:
    """Return the rule of an operation like ``nccl:_all_gather_base`` or ``ALLTOALL_BASE``; None for an unknown one."""
    return _BY_KEY.get(_key(operation))
