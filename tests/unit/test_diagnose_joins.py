"""Whose line it is, who ended first, what only echoes, and what of a run's folder is read."""

import json
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose.lines import timestamp_of
from allranks.analysis.diagnose.terminal import diagnosis_lines
from tests.unit.diagnose_examples import DEVICE, DISK, answer, ids, of, oom
from tests.unit.test_diagnose_judge import LOST

BEGAN = "n1:70:70 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 3 nranks 4 cudaDev 0 busId 1000 - Init START"
FAILED = "n1:70:71 [0] NCCL WARN Cuda failure 'invalid device ordinal'"
RAY = '(Worker[rank={0}] pid=5, ip=10.0.0.{0})   File "/code/x.py", line 3, in f'


@pytest.mark.parametrize(
    ("files", "rank", "host"),
    [
        ({"train_rank0.log": f"[default3]: {DEVICE}"}, None, None),  # a rank within its node is no rank of the job
        ({"n1.rank0.log": f"[rank3]: {DEVICE}"}, 3, None),  # another rank need not be on this rank's host
        ({"n1.rank0.log": DEVICE}, 0, "n1"),
        ({"job.out": f"(Worker[rank=5] pid=7, ip=10.0.0.4) {DEVICE}"}, 5, "10.0.0.4"),
        ({"job.out": f"[PG 0 Rank 2] {DEVICE}"}, 2, None),
        ({"job.out": f"3: working\n1: working\n2: {DEVICE}"}, None, None),
        ({"job.out": f"{BEGAN}\n{FAILED}"}, 3, "n1"),
        ({"ray.out": f"{RAY.format(1)}\n{RAY.format(2)}", "all.out": f"[rank1]: x\n[rank2]: {DEVICE}"}, 2, "10.0.0.2"),
    ],
)
def test_whose_line_it_is(tmp_path: Path, files: dict[str, str], rank: int | None, host: str | None) -> None:
    (finding,) = of(tmp_path, files).findings
    assert (finding.id, finding.rank, finding.host) == ("invalid_device", rank, host)


@pytest.mark.parametrize(
    ("text", "stamp"),
    [
        ("2025-03-01T12:00:00+02:00 x", datetime(2025, 3, 1, 10, tzinfo=UTC)),
        ("[2025-03-01 10:00:00,250] x", datetime(2025, 3, 1, 10, 0, 0, 250_000, tzinfo=UTC)),
        ("E0301 10:00:00.5 x", datetime(2000, 3, 1, 10, 0, 0, 500_000, tzinfo=UTC)),
        ("Mar  1 10:00:00 n1 x", datetime(2000, 3, 1, 10, tzinfo=UTC)),
        ('{"event": "step", "time": 1700000000.5}', datetime.fromtimestamp(1700000000.5, UTC)),
        ("2025-13-01 10:00:00 x", None),
        ("nothing", None),
    ],
)
def test_times_of_lines(text: str, stamp: datetime | None) -> None:
    assert timestamp_of(text) == (stamp.timestamp() if stamp else None)


FIELDS = (
    "  time      : 2025-02-04_03:04:05\n  host      : {}\n  rank      : {} (local_rank: 5)\n  exitcode  : 1 (pid: 7)\n"
    "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org"
)


@pytest.mark.parametrize("others", [0, 40])
def test_the_agents_table_names_the_rank_and_only_its_own_lines_count(tmp_path: Path, others: int) -> None:
    """The root cause stands last, behind all the others that failed."""
    rows = "\n".join(f"[{i}]:\n{FIELDS.format('node-a', 20 + i)}" for i in range(1, 1 + others))
    root = f"Root Cause (first observed failure):\n[0]:\n{FIELDS.format('node-d', 13)}"
    found = of(tmp_path, f"train.py FAILED\n{'-' * 20}\nFailures:\n{rows}\n{'-' * 20}\n{root}\n{'=' * 20}")
    assert answer(found) == ("unexplained", []) and found.unexplained is not None
    assert (found.unexplained.emitter, found.unexplained.rank, found.unexplained.host) == ("launcher", 13, "node-d")


def ends(*rows: tuple[int, int, float]) -> str:
    failed = [{"rank": r, "host": f"n{r}", "pid": 9 + r, "exitcode": c, "time": t} for r, c, t in rows]
    return json.dumps({"host": "n1", "attempt": 1, "failed": failed}, indent=2)


def test_of_a_run_only_the_newest_attempt_is_read(tmp_path: Path) -> None:
    """Given itself, or found in a folder; with its stacks and records, without what is no log."""
    run, other = tmp_path / "runs" / "r", "ModuleNotFoundError: No module named 'peft'"
    of(run, {"logs/attempt-1/n1.rank0.log": DISK, "logs/attempt-2/n1.rank0.log": DEVICE, "plan.json": "{}"})
    others = dict.fromkeys(["logs/attempt-2/notes.md", "checkpoints/step-1/x.log", "other.log"], other)
    of(run, {**others, "spec.yaml": "{}"})
    for given in (run, tmp_path):
        found = diagnose([given])
        assert (ids(found), found.files) == (["invalid_device"], 1), given
    interfaces = {f"logs/attempt-{n}/n1.connections.json": json.dumps({"interfaces": {f"ib{n}": 3}}) for n in (1, 2)}
    assert of(run, interfaces).health.transports == {"TCP/ib2": 3}


def flight(*states: str) -> str:
    call = {"process_group": ["0", "x"], "profiling_name": "nccl:all_reduce", "input_sizes": [[4]]}
    entries = [{**call, "collective_seq_id": seq, "state": state} for seq, state in enumerate(states, 1)]
    return json.dumps({"pg_config": {}, "entries": entries})


def test_what_of_a_folder_is_read(tmp_path: Path) -> None:
    """Flight records of a run with its logs; no folder or file that holds no logs."""
    files = {"logs/attempt-1/n1.rank0.log": "step 1 loss 2.0", "plan.json": "{}", "spec.yaml": "{}"}
    flights = {f"hang/attempt-1/flight.rank{r}": flight(*["completed", "started"][: 2 - r]) for r in (0, 1)}
    finding = of(tmp_path / "run", files | flights).findings[0]
    assert (finding.id, finding.rank) == ("collective_mismatch", 1)
    others = ("wandb/b.log", ".git/c.log", "train.py", "job.sbatch", "notes.md")
    found = of(tmp_path / "logs", {"a.log": DEVICE, **dict.fromkeys(others, DISK)})
    assert (ids(found), found.files) == (["invalid_device"], 1)


def test_more_files_than_are_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.analysis.diagnose.logs.MAX_FILES", 3)
    found = of(tmp_path, {f"{i}.log": "step 1 loss 2.0" for i in range(5)})
    assert found.files == 3
    assert "more than 3 files" in found.problems[0].text


def test_files_read_in_parallel_come_back_in_their_order(tmp_path: Path) -> None:
    alone = of(tmp_path, {f"{i}.log": "x\n" * (10 * i) + f"[rank{i}]: {DISK if i % 2 else DEVICE}" for i in range(6)})
    together = diagnose([tmp_path], workers=3)
    assert together == alone
    for finding in together.findings:
        assert all(e.text.startswith(f"[rank{Path(e.file).stem}]") for e in finding.evidence)


def test_events_of_an_earlier_attempt_are_another_story_and_an_echo_is_no_cause(tmp_path: Path) -> None:
    def error(rank: int, kind: str, *, echo: bool = False) -> str:
        event = {"event": "error", "rank": rank, "time": 1.7e9 + 9 - rank, "type": kind, "message": "m", "echo": echo}
        return json.dumps(event, separators=(",", ":"))

    first, echo = error(0, "IndexError"), error(1, "ValueError", echo=True)
    start = json.dumps({"event": "start", "rank": 0, "time": 1.7e9 + 9})
    assert ids(of(tmp_path, {"rank0.jsonl": f"{first}\n{start}"})) == []
    found = of(tmp_path, {"rank0.jsonl": f"{start}\n{first}", "rank1.jsonl": echo})
    assert (ids(found), found.findings[0].rank) == (["application_error"], 0)
    assert "IndexError" in found.findings[0].cause and not any("ValueError" in line for line in found.story)


HANG = {"event": "hang", "time": 1.7e9 + 9, "rank": 1, "attempt": 1, "kind": ""}
HANG |= {"host": "n1", "ranks": [2, 3], "where": "x"}


@pytest.mark.parametrize(("kind", "named"), [("dataloader_hang",) * 2, ("of_a_later_version", "collective_hang")])
def test_what_the_watch_saw_comes_first_and_its_own_kills_are_no_cause(tmp_path: Path, kind: str, named: str) -> None:
    hang = json.dumps({**HANG, "kind": kind, "message": "hang: rank 2 fell out"}, separators=(",", ":"))
    found = of(tmp_path, {"rank2.jsonl": hang, "n1.exit.json": ends((0, -9, 1.7e9 + 20), (1, -9, 1.7e9 + 20))})
    assert [(f.id, f.rank, f.host) for f in found.findings] == [(named, 2, "n1")]
    assert ["rank 2" in line for line in found.story] == [True]  # how the ranks were ended is no news of its own


def test_a_rank_that_ended_itself_without_a_word_is_named_before_those_that_miss_it(tmp_path: Path) -> None:
    """sys.exit(7) leaves no traceback; what rank 0 raises then is an echo, whatever its own exit code."""
    files = {"n1.exit.json": ends((1, 7, 1.7e9), (0, 1, 1.7e9 + 3)), "n0.rank0.log": LOST, "n1.rank1.log": "step 1"}
    found = of(tmp_path, files)
    (finding,) = found.findings
    assert (finding.id, finding.rank, finding.host) == ("application_error", 1, "n1")
    assert "exit code 7" in finding.cause and "without an error" in finding.title
    assert any("rank 1 on n1: ended with exit code 7" in line for line in found.story)
    echo = {"n1.exit.json": ends((0, 1, 1.7e9)), "n0.rank0.log": LOST}
    assert ids(of(tmp_path / "echo", echo)) == ["peer_died_first"]  # who misses another has said so
    said = 'Traceback (most recent call last):\n  File "/x/train.py", line 3, in main\nKeyError: 1'
    assert "exit code 7" not in of(tmp_path, {**files, "n1.rank1.log": said}).findings[0].cause


def test_a_warning_that_names_a_failure_is_no_harmless_one(tmp_path: Path) -> None:
    found = of(tmp_path, f"UserWarning: {DEVICE.partition(': ')[2]}")
    assert (ids(found), found.benign) == (["invalid_device"], [])
    cloned = of(tmp_path, "RuntimeError: Failed to clone() tensor with name base.lora_A")
    assert (ids(cloned), [b.id for b in cloned.benign]) == ([], ["clone_fallback"])
    more = "Failed to clone() tensor with name base.lora_B\n" * 9 + "RuntimeError: Failed to clone() tensor with name x"
    often = of(tmp_path, more)
    assert (ids(often), often.benign[0].count) == ([], 10)


def test_many_lines_of_one_rank_crowd_out_no_other(tmp_path: Path) -> None:
    lines = [f"[rank0]: 2025-02-04 10:00:09 {DEVICE}"] * 200 + [f"[rank1]: 2025-02-04 10:00:01 {DEVICE}"]
    finding = of(tmp_path, "\n".join(lines)).findings[0]
    assert (finding.rank, finding.count) == (1, 201)


def test_what_a_person_is_shown(tmp_path: Path) -> None:
    causes = [DEVICE, DISK, "ModuleNotFoundError: No module named 'peft'", "bind: Address already in use", oom()]
    files = {f"n{i}.rank{i}.log": f"[2025-02-04 10:00:0{i},000] {text}" for i, text in enumerate(causes)}
    files |= {f"x{i}.log": "\x00\x01\x02\x03" * 2000 for i in range(14)}
    files["n0.rank0.log"] += f" {'y' * 250}" + "\nFutureWarning: x is deprecated" * 3
    diagnosis = of(tmp_path, files)
    text = "\n".join(click.unstyle(line) for line in diagnosis_lines(diagnosis, 80))
    assert len(diagnosis.findings) == 5 and all(f.id in text for f in diagnosis.findings)
    more = f"and {len(diagnosis.problems) - 12} more"
    for part in ("or perhaps", "less likely: ", more, "(3 times)", "In order of time:", " ..."):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()[1:]) <= 80  # the first is one line for a pager


# clocks of nodes that differ: how far is read from steps that both log, or it is said that nothing tells

START = datetime(2025, 3, 1, 10, 0, 0, tzinfo=UTC).timestamp()


def _log(ahead_s: float, fails_at: float, error: str, *, steps: int = 39, step_s: float = 2) -> str:
    """A rank's log by a clock that is `ahead_s` ahead: a step each 2 s, then its error."""
    rows = [*((step_s * n, f"step {n} loss 2.0") for n in range(1, steps + 1)), (fails_at, error)]
    times = [START + ahead_s + at for at, _ in rows]
    stamps = [f"[{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S},{int(t % 1 * 1000):03d}]" for t in times]
    return "\n".join(f"{stamp} {text}" for stamp, (_, text) in zip(stamps, rows, strict=True))


def two(ahead_s: float, **log: float) -> dict[str, str]:
    """Rank 0 on node-a runs out of disk at 100 s; rank 1 on node-b failed 3 s before it, by a clock that is ahead."""
    return {"node-a.rank0.log": _log(0, 100, DISK), "node-b.rank1.log": _log(ahead_s, 97, DEVICE, **log)}


@pytest.mark.parametrize("ahead_s", [0.0, 0.2, -41.5, 3600.0])
def test_first_cause_is_first_whatever_its_clock_says(tmp_path: Path, ahead_s: float) -> None:
    found = of(tmp_path, two(ahead_s))
    both = [("invalid_device", 1, "node-b"), ("disk_full", 0, "node-a")]
    assert [(f.id, f.rank, f.host) for f in found.findings] == both
    assert found.clocks.offsets_s == ({"node-b": pytest.approx(ahead_s, abs=0.05)} if abs(ahead_s) > 1 else {})
    assert not found.clocks.unknown and not found.findings[0].against
    assert found.story[0].split("  ")[1].startswith("rank 1 on node-b")


def test_clocks_that_nothing_compares_are_said(tmp_path: Path) -> None:
    """Without exchange, ranks drift apart: that is no difference of clocks."""
    found = of(tmp_path, two(37, steps=0))
    assert found.clocks.unknown and "order between hosts is uncertain" in found.clocks.note
    assert any("clock" in text for text in found.findings[0].against)
    assert of(tmp_path, two(0, step_s=2.4)).clocks.offsets_s == {}
    third = of(tmp_path, two(37) | {"node-c.rank2.log": _log(0, 99, DEVICE, steps=0)}).clocks
    assert (third.offsets_s, third.unknown) == ({"node-b": pytest.approx(37, abs=0.05)}, ["node-c"])
    assert "node-c" in third.note
