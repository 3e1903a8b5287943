"""State for each collective whether the sizes of its tensors must agree between ranks.

The names are those that torch records: in flight-recorder dumps (``nccl:_all_gather_base``), in traces
(``c10d::_allgather_base_``) and in messages of the watchdog (``_ALLGATHER_BASE``). `size_rule` looks a name up exactly,
after removing the prefix of the backend, ranks of a send, and differences in case and underscores.
"""

from __future__ import annotations

import re

from msgspec import Struct

_DOCS = "torch.distributed documentation: {}"
_MATCH = "torch/distributed/flight_recorder/components/types.py, Op.match: {}"


class SizeRule(Struct, frozen=True):
    """Whether the sizes of a collective must be equal on all ranks.

    ``inputs`` and ``outputs``: equal sizes are required. ``called_uneven``: the call also accepts unequal sizes, but
    then NCCL runs and records another operation (``ALLGATHER_coalesced``), and Gloo refuses it. A trace shows the call;
    a flight recorder and the watchdog show the operation.
    """

    inputs: bool
    outputs: bool
    source: str
    called_uneven: bool = False

    @property
    def even_calls(self) -> bool:
        """Return whether all calls of this name move the same number of bytes on all ranks."""
        return self.inputs and self.outputs and not self.called_uneven


_SAME = SizeRule(True, True, _MATCH.format("input and output sizes are compared"))
_LIST = SizeRule(
    True,
    True,
    (
        "ProcessGroupNCCL.cpp, allgather and reduce_scatter: check_same_size decides between this operation and a "
        "coalesced one"
    ),
    called_uneven=True,
)
_GATHER = SizeRule(True, False, _MATCH.format("output sizes are not compared, because only the root has outputs"))
_SCATTER = SizeRule(False, True, _MATCH.format("input sizes are not compared, because only the root has inputs"))
_GATHER_V = SizeRule(
    False, True, "torchcomms, all_gather_v: the sizes of the outputs, by rank, are the same list on all ranks"
)
_SCATTER_V = SizeRule(
    True, False, "torchcomms, reduce_scatter_v: the sizes of the inputs, by rank, are the same list on all ranks"
)
_SPLITS = SizeRule(False, False, _DOCS.format("all_to_all_single, input_split_sizes and output_split_sizes"))
_COALESCED = SizeRule(
    False, False, _MATCH.format("only the type is compared, because the entry has no sizes of its own")
)
_PEERS = SizeRule(False, False, _DOCS.format("send and recv: each pair of ranks has its own size"))

_NAMES: tuple[tuple[SizeRule, str], ...] = (
    (
        _SAME,
        "all_reduce all_reduce_barrier allreduce_coalesced sparse_all_reduce allreduce_sparse barrier "
        "broadcast _broadcast_oop reduce _reduce_oop all_gather_single all_gather_into_tensor "
        "all_gather_into_tensor_coalesced all_gather_into_tensor_out _all_gather_base reduce_scatter_single "
        "reduce_scatter_tensor reduce_scatter_tensor_coalesced _reduce_scatter_base",
    ),
    (_LIST, "all_gather reduce_scatter"),
    (_COALESCED, "allgather_coalesced reduce_scatter_coalesced coalesced"),
    (_GATHER_V, "all_gather_v"),
    (_SCATTER_V, "reduce_scatter_v"),
    (_GATHER, "gather"),
    (_SCATTER, "scatter"),
    (_SPLITS, "all_to_all all_to_all_single alltoall_base all_to_allv all_to_all_v_single"),
    (_PEERS, "send recv recv_any_source sendrecv"),
)
"""The operations of each rule."""
_SEPARATORS = re.compile(r"[^a-z0-9]")


def _key(name: str) -> str:
    operation = name.rpartition(":")[2].split(" ", 1)[0]
    return _SEPARATORS.sub("", operation.lower())


_BY_KEY = {_key(name): rule for rule, names in _NAMES for name in names.split()}


def size_rule(operation: str) -> SizeRule | None:
    """Return the rule of an operation, such as ``nccl:_all_gather_base`` or ``ALLTOALL_BASE``; None for an unknown
    one."""
    return _BY_KEY.get(_key(operation))
