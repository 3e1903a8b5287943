"""Which ranks hold the same weights, and which of them is named where they differ."""

from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose.run_outcome import failure_of
from allranks.launch.restarts import cause_of
from allranks.planning.planner import make_plan
from allranks.planning.replicas import replica_sets, verify_line
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.train.replica_check import odd_ranks
from tests.unit.test_plan import facts


@pytest.mark.parametrize(
    ("shards", "replicated", "digests", "odd", "unsure"),
    [
        (3, True, b"aaa", [], []),
        (3, True, b"aba", [1], []),
        (3, True, b"aab", [2], []),
        (2, True, b"ab", [], [[0, 1]]),
        (4, True, b"aabb", [], [[0, 1, 2, 3]]),
        (3, False, b"abc", [], []),  # no rank has a replica
        (2, False, b"ababab", [], []),  # HSDP on three nodes
        (2, False, b"abcbab", [2], []),
        (2, False, b"abacaa", [], [[1, 3, 5]]),
    ],
)
def test_the_odd_rank_is_named_where_a_majority_agrees(
    shards: int, replicated: bool, digests: bytes, odd: list[int], unsure: list[list[int]]
) -> None:
    sets = replica_sets(len(digests), shards, replicated=replicated)
    assert odd_ranks(sets, [bytes([one]) for one in digests]) == (odd, unsure)


@pytest.mark.parametrize(
    ("who", "rank", "host"),
    [
        ("rank 1 on n2 differ from those of their replicas", 1, "n2"),
        ("ranks 0 (n1) and 1 (n2) differ from each other, unknown which is wrong", None, None),
    ],
)
def test_the_sentence_gives_rank_host_and_restart(tmp_path: Path, who: str, rank: int | None, host: str | None) -> None:
    found = failure_of(RunDir(tmp_path), f"after step 8 the weights of {who} (observe.verify_every); they last agreed")
    assert (found.id, found.rank, found.host) == ("replicas_diverged", rank, host)
    assert cause_of(found.id) == "infrastructure"


@pytest.mark.parametrize(
    ("strategy", "ranks", "said"),
    [
        ("pytorch_ddp", 3, "the weights of 3 copies are compared every 50 steps"),
        ("zero2", 2, "with two the wrong one cannot be told"),
        ("zero3", 3, "nothing is compared, because no rank holds the weights of another: zero3"),
        ("pytorch_zero3", 2, "nothing is compared"),
        ("pytorch_ddp", 1, "one rank has none"),
    ],
)
def test_the_plan_says_what_is_compared(strategy: str, ranks: int, said: str) -> None:
    spec: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    spec |= {"strategy": {"name": strategy}, "cluster": {"procs_per_node": ranks}}
    assert said in str(verify_line(make_plan(parse_spec(spec), facts()), 50))
