"""Which sizes must agree between ranks, and how calls of several ranks are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.flight_recorder import OpenCollective, RecordedCall, open_collectives, read_flight_record
from allranks.launch.monitor.hang_rules import analyze_hang
from allranks.launch.monitor.records import HangAlarm, NodeEvidence, RankEvidence
from allranks.utils.collectives import size_rule

# (name, input sizes, output sizes) of rank 0 and of rank 1. Those of gloo as torch 2.13 records them; those of nccl as
# in torch's own tests of its flight-recorder analyzer
Recorded = tuple[str, list[list[int]], list[list[int]]]
ALLOWED: dict[str, tuple[Recorded, Recorded]] = {
    "gather": (("gloo:gather", [[3]], [[2, 3]]), ("gloo:gather", [[3]], [])),
    "scatter": (("gloo:scatter", [[2, 3]], [[3]]), ("gloo:scatter", [], [[3]])),
    "uneven splits": (("nccl:all_to_all", [[7]], [[5]]), ("nccl:all_to_all", [[4]], [[6]])),
    "uneven list": (("nccl:ALLGATHER_coalesced", [], []), ("nccl:ALLGATHER_coalesced", [], [])),
    "coalesced": (("nccl:coalesced", [[2]], [[2]]), ("nccl:coalesced", [[3]], [[3]])),
    "barrier": (("gloo:barrier", [], []), ("gloo:barrier", [], [])),
    "unknown": (("other:fused_op", [[2]], [[2]]), ("other:fused_op", [[3]], [[3]])),
}
FORBIDDEN: dict[str, tuple[Recorded, Recorded]] = {
    "FSDP gathers": (("nccl:_all_gather_base", [[512]], [[1024]]), ("nccl:_all_gather_base", [[480]], [[960]])),
    "FSDP2 gathers": (("nccl:all_gather_into_tensor", [[512]], [[1024]]),
                      ("nccl:all_gather_into_tensor", [[480]], [[960]])),
    "FSDP reduces": (("nccl:_reduce_scatter_base", [[1024]], [[512]]), ("nccl:_reduce_scatter_base", [[960]], [[480]])),
    "ZeRO coalesces": (("nccl:reduce_scatter_tensor_coalesced", [[8], [8]], [[4], [4]]),
                       ("nccl:reduce_scatter_tensor_coalesced", [[8], [6]], [[4], [3]])),
    "list": (("gloo:all_gather", [[3]], [[2, 3]]), ("gloo:all_gather", [[4]], [[2, 4]])),
    "all-reduce": (("gloo:all_reduce", [[6]], [[6]]), ("gloo:all_reduce", [[8]], [[8]])),
    "broadcast": (("gloo:broadcast", [[6]], [[6]]), ("gloo:broadcast", [[8]], [[8]])),
    "gather": (("gloo:gather", [[3]], [[2, 3]]), ("gloo:gather", [[4]], [])),
    "scatter": (("gloo:scatter", [[2, 3]], [[3]]), ("gloo:scatter", [], [[4]])),
}  # fmt: skip


def _write(folder: Path, ranks: tuple[Recorded, ...]) -> list[Path]:
    paths = []
    for rank, (name, inputs, outputs) in enumerate(ranks):
        entry: dict[str, Any] = {
            "process_group": ["0", "default_pg"],
            "profiling_name": name,
            "is_p2p": False,
            "frames": [{"name": "step", "filename": "/home/u/train.py", "line": 30}],
        }
        done = entry | {"collective_seq_id": 1, "profiling_name": "gloo:barrier", "retired": True, "state": "scheduled"}
        entry |= {"collective_seq_id": 2, "input_sizes": inputs, "output_sizes": outputs, "state": "started"}
        paths.append(folder / f"trace_rank_{rank}.json")
        paths[-1].write_text(json.dumps({"pg_config": {}, "entries": [done, entry]}))
    return paths


def _compare(folder: Path, ranks: tuple[Recorded, ...]) -> OpenCollective[RecordedCall]:
    (found,) = open_collectives({r: read_flight_record(p).calls for r, p in enumerate(_write(folder, ranks))})
    return found


def _watched(folder: Path, ranks: tuple[Recorded, ...]) -> str:
    """Return what the hang watch says of the same records."""
    nodes = []
    for r, path in enumerate(_write(folder, ranks)):
        calls = [call.without_stack() for call in read_flight_record(path).calls]
        rank = RankEvidence(rank=r, pid=9, state="S sleeping", calls=calls)
        nodes.append(NodeEvidence(node=r, host=f"n{r}", time=104.0, ranks=[rank]))
    alarm = HangAlarm(node=0, host="n0", rank=0, phase="train", part="", step=6, since=100.0, time=104.0, limit_s=4.0)
    return analyze_hang(nodes, {0: "n0", 1: "n1"}, alarm, 1, 106.0).kind


@pytest.mark.parametrize("ranks", ALLOWED.values(), ids=ALLOWED)
def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path, ranks: tuple[Recorded, Recorded]) -> None:
    assert not _compare(tmp_path, ranks).differs
    assert [f.id for f in diagnose([tmp_path]).findings] == ["collective_hang"]
    assert _watched(tmp_path, ranks) == "collective_hang"


@pytest.mark.parametrize("ranks", FORBIDDEN.values(), ids=FORBIDDEN)
def test_sizes_that_must_be_equal_are_a_mismatch(tmp_path: Path, ranks: tuple[Recorded, Recorded]) -> None:
    assert _compare(tmp_path, ranks).differs
    assert [f.id for f in diagnose([tmp_path]).findings] == ["collective_mismatch"]
    assert _watched(tmp_path, ranks) == "collective_mismatch"


def test_the_rank_with_the_other_size_is_named_with_both_sizes(tmp_path: Path) -> None:
    even, odd = FORBIDDEN["FSDP gathers"]
    found = _compare(tmp_path, (even, odd, even))
    assert found.rarest == [1]
    assert found.describe(found.calls[1]) == "_all_gather_base [[480]]"
    assert found.describe(found.contrast(1)) == "_all_gather_base [[512]]"
    finding = diagnose([tmp_path]).findings[0]
    assert finding.rank == 1 and "rank 1: _all_gather_base [[480]] in /home/u/train.py:30:step" in finding.cause


def test_sizes_that_were_not_recorded_are_no_mismatch(tmp_path: Path) -> None:
    call = _compare(tmp_path, FORBIDDEN["all-reduce"]).calls[0]
    calls = {0: [call], 1: [RecordedCall(group="0", seq=2, op="all_reduce", sizes="", done=False, state="", frames=[])]}
    assert not next(open_collectives(calls)).differs


@pytest.mark.parametrize(
    "name",
    ["nccl:_all_gather_base", "_ALLGATHER_BASE", "c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"],
)
def test_all_spellings_of_a_name_have_one_rule(name: str) -> None:
    rule = size_rule(name)
    assert rule is not None and rule.inputs and rule.outputs and rule.even_calls
