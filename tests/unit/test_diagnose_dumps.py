"""Dumps of hung jobs: py-spy and faulthandler stacks, flight recorders, whose pickles are never executed."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.analysis.flight_recorder import plain_value
from tests.unit.diagnose_examples import DEVICE, ids, of

DISTRIBUTED = "/env/site-packages/torch/distributed/distributed_c10d.py"
Calls = list[tuple[int, str, int, str]]


def _dump(calls: Calls, line: int) -> dict[str, Any]:
    entries = [
        {
            "record_id": i, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "state": state,
            "profiling_name": f"nccl:{op}", "input_sizes": [[size]], "output_sizes": [[size]], "is_p2p": False,
            "frames": [
                {"name": op, "filename": DISTRIBUTED, "line": 7},
                {"name": "train", "filename": "/code/train.py", "line": line},
            ],
        }
        for i, (seq, op, size, state) in enumerate(calls)
    ]  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.9", "pg_config": groups, "entries": entries}


def _write(folder: Path, ranks: list[Calls], form: str) -> Diagnosis:
    for rank, calls in enumerate(ranks):
        dump = _dump(calls, 40 + rank)
        if form == "json":
            (folder / f"trace_rank_{rank}.json").write_text(json.dumps(dump))
        else:
            (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=int(form)))
    return diagnose([folder])


DONE, WAITS = (1, "all_reduce", 4, "completed"), (2, "all_reduce", 4, "started")


@pytest.mark.parametrize("form", ["2", "4", "5", "json"])
@pytest.mark.parametrize(
    ("ranks", "kind", "rank", "says"),
    [
        ([[DONE, WAITS], [DONE], [DONE, WAITS]], "collective_mismatch", 1, "/code/train.py:41"),
        ([*[[DONE, WAITS]] * 2, [DONE, (2, "broadcast", 4, "started")]], "collective_mismatch", 2, "broadcast"),
        ([[(9, "all_reduce", 4, "started")]] * 3, "collective_hang", None, "network"),
        ([[(1, "all_reduce", 4, "started")]] * 3, "first_collective_failed", None, ""),
    ],
)
def test_rank_that_never_came_is_named_with_its_line(
    tmp_path: Path, ranks: list[Calls], kind: str, rank: int | None, says: str, form: str
) -> None:
    finding = _write(tmp_path, ranks, form).findings[0]
    assert (finding.id, finding.rank) == (kind, rank) and says in finding.cause


def test_gloo_marks_what_has_ended_as_retired_only(tmp_path: Path) -> None:
    """As torch 2.13 really writes it: the state stays `scheduled`."""
    for rank in range(2):
        dump = _dump([(1, "all_reduce", 4, "scheduled"), (2, "broadcast", 2, "scheduled")][: 2 - rank], 40)
        dump["entries"][0]["retired"] = True
        (tmp_path / f"trace_rank_{rank}.json").write_text(json.dumps(dump))
    finding = diagnose([tmp_path]).findings[0]
    assert (finding.id, finding.rank) == ("collective_mismatch", 1)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("BOMB",)


def test_pickles_are_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(_dump([DONE], 1) | {"pg_status": Bomb()}, protocol=2))
    diagnose([tmp_path])
    assert not (tmp_path / "BOMB").exists()


def test_cut_dump_is_said(tmp_path: Path) -> None:
    whole = pickle.dumps(_dump([DONE] * 50, 1), protocol=2)
    (tmp_path / "trace_rank_0").write_bytes(whole[: len(whole) // 2])
    found = of(tmp_path, {"good.log": DEVICE})
    assert ids(found) == ["invalid_device"]
    assert "truncated or damaged" in found.problems[0].text


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "value",
    [{"a": [1, 2.5, None, True, "x"], "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))}, [], {}, [{}] * 3, 1 << 70],
)
def test_plain_value_reads_what_pickle_writes(value: object, protocol: int) -> None:
    assert plain_value(pickle.dumps(value, protocol=protocol)) == value


PYSPY = """Process {pid}: /usr/bin/python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (active): "MainThread"
{frames}
    train (/code/train.py:{line})
    <module> (/code/train.py:99)
Thread {other} (idle): "Thread-1"
    wait (threading.py:331)
    _bootstrap (threading.py:1002)
"""
WAIT = """    synchronize (torch/cuda/streams.py:5)
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    wrapper (torch/distributed/c10d_logger.py:81)"""
LOAD = """    poll (selectors.py:415)
    get (multiprocessing/queues.py:113)
    _try_get_data (torch/utils/data/dataloader.py:1251)
    _next_data (torch/utils/data/dataloader.py:1402)"""
SAVE = """    _save (torch/serialization.py:900)
    save_checkpoint (/code/ckpt.py:12)"""
OWN = "    tokenise (/code/data.py:12)"


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([WAIT, WAIT, LOAD, WAIT], [("dataloader_hang", 2)]),
        ([WAIT, WAIT, SAVE, WAIT], [("checkpoint_collective", 2)]),
        ([WAIT, WAIT, OWN, WAIT], [("collective_mismatch", 2)]),
        ([WAIT] * 3, [("collective_hang", None)]),
        ([OWN, OWN], []),  # a job that works
    ],
)
def test_stack_that_is_unlike_the_others_names_rank_and_place(tmp_path: Path, ranks: list[str], named: Any) -> None:
    for rank, frames in enumerate(ranks):
        text = PYSPY.format(pid=100 + rank, other=900 + rank, frames=frames, line=50 if frames == WAIT else 60)
        (tmp_path / f"node-a.rank{rank}.pyspy.txt").write_text(text)
    findings = diagnose([tmp_path]).findings
    assert [(f.id, f.rank) for f in findings[:1]] == named
    assert all("rank 2" in f.cause for f in findings[:1] if f.rank)


def test_faulthandler_dumps(tmp_path: Path) -> None:
    frame = 'Current thread 0x01 (most recent call first):\n  File "/env/torch/{}\n  File "/code/t.py", line 9 in main'
    wait = frame.format('distributed/distributed_c10d.py", line 5 in barrier')
    load = frame.format('utils/data/dataloader.py", line 5 in _next_data')
    finding = of(tmp_path, {f"n.rank{rank}.log": text for rank, text in enumerate([wait, load, wait])}).findings[0]
    assert (finding.id, finding.rank) == ("dataloader_hang", 1)
    # recorded from the debug server of torch 2.13
    own = "=== Rank {}: http://n{}:377/handler/dump_traceback? ===\nCurrent thread 0x07 (most recent call first):\n"
    own += '  <no Python frame>\n\n{}\n  File "/code/t.py", line 4 in <module>\n'
    text = "\n".join(own.format(r, r, text.replace("Current t", "T")) for r, text in enumerate([wait, load, wait]))
    finding = of(tmp_path / "server", {"stacks_20261129_215733.txt": text}).findings[0]
    assert (finding.id, finding.rank, finding.host) == ("dataloader_hang", 1, "n1")


# As NCCL's documentation and sources print it (2.24 to 2.30), not recorded on GPUs.
RAS = """NCCL version 2.30.7 compiled with CUDA 12.8
Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE
    1         8         4         1         4        32   RUNNING  OK

Errors
======

{errors}

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

{warnings}
"""
GONE = "Process 3487984 on node 172.16.64.213 managing GPU 5"
INCOMPLETE = (
    f"INCOMPLETE\n  Missing communicator data from 1 job process\n  {GONE}\n\n#{{}} (cf264af53edbe986) INCOMPLETE\n  "
)
INCOMPLETE += "Missing communicator data from 1 rank\n  "
OLD, NEW = "The missing rank: 21", "Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213"
DEAD = f"DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n  {GONE}"
UNEVEN = "#0-0 (78db921d1c117b4a) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
LAGS = UNEVEN + "  31 ranks have launched up to operation 64\n  Rank 7 has launched up to operation {} -- "
LAGS += "GPU 3 managed by process 1650386 on node node1"
AHEAD = f"{UNEVEN}  30 ranks have launched up to operation 640\n  2 ranks have launched up to operation 700\n"
AHEAD += "  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124\n"
AHEAD += "  Rank 13 -- [process information not found]"


def _text(errors: str = "", warnings: str = "") -> str:
    return RAS.format(errors=errors, warnings=warnings)


@pytest.mark.parametrize(
    ("text", "name", "rank", "says"),
    [
        (_text(INCOMPLETE.format("0-0") + OLD), "rank_died", 21, "no longer"),
        (_text(INCOMPLETE.format("1-3") + NEW), "rank_died", None, "3487984"),
        (_text(DEAD), "rank_died", None, "172.16.64.213"),
        (_text(warnings=LAGS.format(60)), "collective_mismatch", 7, "others 64 (rank 7"),
        (_text(warnings=LAGS.format(63)), "", None, ""),  # of a job that works
        (_text(warnings=LAGS.format(63)) * 2, "collective_mismatch", 7, "AllReduce 63"),
        (_text(warnings=AHEAD), "", None, ""),
        (f"step 1\n{_text()}ZeroDivisionError: x\n", "application_error", None, ""),
    ],
)
def test_reports_of_ncclras(tmp_path: Path, text: str, name: str, rank: int | None, says: str) -> None:
    diagnosis = of(tmp_path, {"job.txt": text})
    findings = diagnosis.findings
    assert [(f.id, f.rank) for f in findings] == [(name, rank)] * bool(name)
    assert diagnosis.unexplained is None  # the heading TIMEOUT is not Slurm's
    assert all(says in f"{f.title} {f.cause} {f.host}" for f in findings)
