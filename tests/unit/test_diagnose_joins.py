"""Whose line it is, who ended first, what only echoes, and what of a run's folder is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.analysis.diagnose.lines import timestamp_of
from tests.unit.test_diagnose_judge import LOST, watchdog

DEVICE = "RuntimeError: CUDA error: invalid device ordinal"
DISK = "OSError: [Errno 28] No space left on device: 'x'"


def of(folder: Path, files: dict[str, str]) -> Diagnosis:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return diagnose([folder])


def first(folder: Path, files: dict[str, str]) -> tuple[str, int | None, str | None]:
    finding = of(folder, files).findings[0]
    return finding.id, finding.rank, finding.host


def ids(found: Diagnosis) -> list[str]:
    return [f.id for f in found.findings]


@pytest.mark.parametrize(
    ("name", "line", "rank", "host"),
    [
        ("train_rank0.log", f"[default3]: {DEVICE}", None, None),  # a rank within its node is no rank of the job
        ("n1.rank0.log", f"[rank3]: {DEVICE}", 3, None),  # another rank need not be on this rank's host
        ("n1.rank0.log", DEVICE, 0, "n1"),
        ("job.out", f"(Worker[rank=5] pid=7, ip=10.0.0.4) {DEVICE}", 5, "10.0.0.4"),
        ("job.out", f"[PG 0 Rank 2] {DEVICE}", 2, None),
        ("job.out", f"3: working\n1: working\n2: {DEVICE}", None, None),
    ],
)
def test_whose_line_it_is(tmp_path: Path, name: str, line: str, rank: int | None, host: str | None) -> None:
    assert first(tmp_path, {name: line}) == ("invalid_device", rank, host)


def test_nccls_processes_are_ranks_by_what_they_said_of_themselves(tmp_path: Path) -> None:
    began = "n1:70:70 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 3 nranks 4 cudaDev 0 busId 1000 - Init START"
    failed = "n1:70:71 [0] NCCL WARN Cuda failure 'invalid device ordinal'"
    assert first(tmp_path, {"job.out": f"{began}\n{failed}"}) == ("invalid_device", 3, "n1")


def test_where_a_rank_ran_may_stand_in_another_file(tmp_path: Path) -> None:
    frame = '(Worker[rank={}] pid=5, ip=10.0.0.{})   File "/code/x.py", line 3, in f'
    files = {
        "ray.out": f"{frame.format(1, 6)}\n{frame.format(2, 7)}",
        "all.out": f"[rank1]: working\n[rank2]: {DEVICE}",
    }
    assert first(tmp_path, files) == ("invalid_device", 2, "10.0.0.7")


def test_a_warning_that_comes_again_after_the_last_step_was_not_survived(tmp_path: Path) -> None:
    warning = (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node-a]:29400 (errno: 111 - Connection "
        "refused)."
    )
    found = of(tmp_path, {"a.log": f"{warning}\nstep 1/10 loss 2.5\n{warning}"})
    assert (ids(found), found.benign, found.findings[0].count) == (["rendezvous_unreachable"], [], 2)


def oom(more: str = "", *, want: str = "1.00 GiB", free: str = "") -> str:
    tail = f" GPU 0 has a total capacity of 79.10 GiB of which {free} is free." if free else ""
    return f"{more}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {want}.{tail}"


CANCELLED = "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2025-02-04T03:05:00 ***"
PREEMPTED = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 DUE TO PREEMPTION ***"
CRASH = "  exitcode  : -11 (pid: 7)\n  traceback : Signal 11 (SIGSEGV) received by PID 7"
AWAY = (
    "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
    "connect to (n1, 1)."
)
BARE = "RuntimeError: NCCL communicator: something"
OPTIMIZER = '  File "/v/torch/optim/adamw.py", line 5, in _multi_tensor_adamw'
BARRIER = '  File "/v/torch/distributed/distributed_c10d.py", line 3, in barrier'
HOST_OOM = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 9 bytes."
)
SPARE, NONE_FREE = oom(want="20.00 MiB", free="71.00 GiB"), oom(want="20.00 MiB", free="10.00 MiB")
SAVES = '[rank{}]:   File "/code/x.py", line 3, in save_checkpoint'
WRAPPED = (
    "[rank{r}]:[E204 03:04:05.000001 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation "
    "timeout:\n"
    "[rank{r}]: WorkNCCL(SeqNum=900, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600011 "
    "milliseconds before timing out."
)
MAY_INDICATE = "[rank2]: This may indicate a possible application crash on rank {} or a network set up issue."
SOCKET, SECOND = (f"n{n}:7:7 [0] NCCL INFO Using network Socket" for n in (1, 2))
NO_IB = "n1:7:7 [0] NCCL INFO NET/IB : No device found."
WANTS_IB = "n1:7:7 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0."
WANTS_ETH = "n1:7:7 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0."
BRIDGE, BRIDGE_2 = (f"n{n}:7:7 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>" for n in (1, 2))
READY = "n1:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE"


@pytest.mark.parametrize(
    ("lines", "named", "rank", "says"),
    [
        # how causes weigh against each other
        ([DEVICE, "srun: error: n2: task 5: Exited with exit code 1"], ["invalid_device"], 5, ""),
        ([f"[rank1]: {DEVICE}", "[rank0]: step 3/9 loss 2.0"], ["invalid_device"], 1, ""),
        ([LOST, "Failed to initialize NVML"], ["no_gpu"], None, ""),
        ([f"[rank0]: {LOST}", "[rank1]: KeyError: 'labels'"], ["application_error"], 1, "labels"),
        ([AWAY], ["rendezvous_unreachable"], 1, ""),
        ([AWAY, "[rank0]: bind: Address already in use"], ["port_in_use"], 0, ""),
        ([PREEMPTED, CANCELLED], ["slurm_preempted"], None, ""),
        ([watchdog(0), CRASH], ["rank_died"], None, ""),
        ([DEVICE, "[rank1]: KeyError: 'labels'"], ["invalid_device", "application_error"], None, ""),
        (["KeyError: 'labels'", *(f"step {n}/9 loss 1.0" for n in (2, 3, 4))], [], None, ""),
        (["step 2/9 loss 1.0", "KeyError: 'labels'"], ["application_error"], None, ""),
        ([BARE], ["collective_hang"], None, "does not say why"),
        ([BARE, DEVICE], ["invalid_device"], None, ""),
        (["misc/ibvwrap.cc:7 ibv_modify_qp failed"], [], None, ""),
        ([MAY_INDICATE.format(1)], ["peer_died_first"], 1, "rank 1 disconnected"),
        (["[rank1]: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d"], ["peer_died_first"], 0, ""),
        ([*(f"{r}: [rank{r}]: working" for r in range(3)), f"3: [rank3]: {DEVICE}"], ["invalid_device"], 3, ""),
        # collectives that timed out
        ([WRAPPED.format(r=0, op="ALLREDUCE"), WRAPPED.format(r=1, op="BROADCAST")], ["collective_mismatch"], 0, ""),
        ([watchdog(r, op="ALLTOALL", size=10 + r) for r in (0, 1)], ["collective_hang"], None, ""),
        ([watchdog(r, op="COALESCED", size=10 + r) for r in (0, 1)], ["collective_hang"], None, ""),
        ([watchdog(r, op="ALLGATHER", size=10 + r) for r in (0, 1)], ["collective_mismatch"], 0, "rank 0: 10, rank 1: 11"),
        ([watchdog(0, seq=901), watchdog(1, op="BROADCAST"), watchdog(2, seq=901)], ["collective_mismatch"], 1, ""),
        ([watchdog(0, seq=500), watchdog(0, seq=700, op="BROADCAST")], ["collective_mismatch"], 0, "several groups at once"),
        ([watchdog(0), watchdog(1), SAVES.format(0), SAVES.format(1)], ["checkpoint_collective"], None, ""),
        # memory
        (["[rank0]: optimizer.step()", oom("[rank0]: ")], ["cuda_oom_optimizer_step"], 0, ""),
        (["[rank1]: optimizer.step()", oom("[rank0]: ")], ["cuda_oom"], 0, ""),
        ([oom(want="20.00 MiB", free="500.00 MiB")], ["cuda_oom"], None, ""),
        ([SPARE, NONE_FREE], ["cuda_oom"], None, ""),
        ([BARRIER, "RuntimeError: CUDA error: out of memory"], ["gpu_hardware_fault", "cuda_oom"], None, "first operation"),
        ([OPTIMIZER, HOST_OOM], ["host_oom"], None, "optimizer's step"),
        ([OPTIMIZER, "ValueError: a", *["quiet"] * 80, "step 7/9 loss 2.0", oom()], ["cuda_oom", "application_error"], None, ""),
        ([OPTIMIZER, *["quiet"] * 250, oom()], ["cuda_oom"], None, ""),
        ([f"{r}: {line}" for r in (0, 1) for line in (OPTIMIZER, oom())], ["cuda_oom_optimizer_step"], None, ""),
        # the path of the data
        (["n1:7:7 [0] NCCL WARN Call to ibv_open_device failed", SOCKET], ["silent_socket_fallback"], None, ""),
        ([WANTS_IB, NO_IB, SOCKET], [], None, ""),  # one node, and nothing that broke
        ([WANTS_ETH, NO_IB, SOCKET, SECOND], [], None, ""),  # nobody asked for RDMA
        ([WANTS_IB, SOCKET, SECOND], [], None, ""),  # it was not missing
        ([WANTS_IB, NO_IB, SOCKET, SECOND], ["silent_socket_fallback"], None, ""),
        ([BRIDGE, BRIDGE_2], ["wrong_interface"], None, ""),
        ([BRIDGE, BRIDGE_2, READY], [], None, ""),
        ([BRIDGE], [], None, ""),
    ],
)  # fmt: skip
def test_what_lines_name_together(
    tmp_path: Path, lines: list[str], named: list[str], rank: int | None, says: str
) -> None:
    diagnosis = of(tmp_path, {"a.log": "\n".join(lines)})
    assert ids(diagnosis) == named
    if named:
        assert diagnosis.findings[0].rank == rank
        assert says in diagnosis.findings[0].cause


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
    found = timestamp_of(text)
    assert found == (stamp.timestamp() if stamp else None)


def fields(rank: int, host: str, code: int = 1) -> str:
    return (
        f"  time      : 2025-02-04_03:04:05\n  host      : {host}\n  rank      : {rank} (local_rank: 5)\n"
        f"  exitcode  : {code} (pid: 7120)\n  error_file: <N/A>\n  traceback : To enable traceback see: "
        "https://pytorch.org"
    )


@pytest.mark.parametrize("others", [0, 1, 40])
def test_the_agents_table_names_the_rank_and_only_its_own_lines_count(tmp_path: Path, others: int) -> None:
    """The root cause stands last, behind all the others that failed."""
    told = "\n".join(f"[{i}]:\n{fields(20 + i, 'node-a')}" for i in range(1, 1 + others))
    root = f"Root Cause (first observed failure):\n[0]:\n{fields(13, 'node-d')}"
    text = f"train.py FAILED\n{'-' * 20}\nFailures:\n{told}\n{'-' * 20}\n{root}\n{'=' * 20}"
    found = of(tmp_path, {"a.log": text})
    assert (found.verdict, ids(found)) == ("unexplained", [])
    assert found.unexplained is not None
    assert (found.unexplained.emitter, found.unexplained.rank, found.unexplained.host) == ("launcher", 13, "node-d")


def ends(*rows: tuple[int, int, float]) -> str:
    failed = [{"rank": r, "host": f"n{r}", "pid": 9 + r, "exitcode": c, "time": t} for r, c, t in rows]
    return json.dumps({"host": "n1", "attempt": 1, "failed": failed}, indent=2)


def test_ranks_that_an_agent_stopped_and_that_saved_have_not_failed(tmp_path: Path) -> None:
    """As after the end of the command that followed them."""
    saved = [{"rank": 0, "host": "n1", "pid": 9, "exitcode": 0, "time": 1.7e9}]
    record = json.dumps({"reason": "the agent received SIGTERM", "failed": [], "succeeded": saved}, indent=2)
    assert of(tmp_path, {"n1.exit.json": record}).verdict == "healthy"


def run_folder(folder: Path, logs: dict[str, str]) -> Path:
    for name in ("plan.json", "spec.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name, text in logs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def test_of_a_run_only_the_newest_attempt_is_read(tmp_path: Path) -> None:
    """Given itself, or found in a folder; with its stacks and records, without what is no log."""
    logs = {
        "logs/attempt-1/n1.rank0.log": DISK,
        "logs/attempt-2/n1.rank0.log": DEVICE,
        "logs/attempt-2/notes.md": "ModuleNotFoundError: No module named 'peft'",
        "checkpoints/step-1/x.log": "ModuleNotFoundError: No module named 'peft'",
        "other.log": "ModuleNotFoundError: No module named 'peft'",
    }
    run = run_folder(tmp_path / "runs" / "r", logs)
    for given in (run, tmp_path):
        found = diagnose([given])
        assert (ids(found), found.files) == (["invalid_device"], 1), given
    for attempt, interface in ((1, "eth0"), (2, "ib0")):
        path = run / f"logs/attempt-{attempt}/n1.connections.json"
        path.write_text(json.dumps({"interfaces": {interface: 3}}))
    assert diagnose([run]).health.transports == {"TCP/ib0": 3}


def test_flight_records_of_a_run_are_read_with_its_logs(tmp_path: Path) -> None:
    def dump(*calls: tuple[int, str]) -> str:
        entries = [
            {
                "process_group": ["0", "x"],
                "collective_seq_id": s,
                "profiling_name": "nccl:all_reduce",
                "input_sizes": [[4]],
                "state": state,
            }
            for s, state in calls
        ]
        return json.dumps({"pg_config": {}, "entries": entries})

    files = {
        "logs/attempt-1/n1.rank0.log": "step 1 loss 2.0",
        "hang/attempt-1/flight.rank0": dump((1, "completed"), (2, "started")),
        "hang/attempt-1/flight.rank1": dump((1, "completed")),
    }
    finding = diagnose([run_folder(tmp_path / "r", files)]).findings[0]
    assert (finding.id, finding.rank) == ("collective_mismatch", 1)


def test_folders_that_hold_no_logs_are_passed_over(tmp_path: Path) -> None:
    files = {
        "a.log": DEVICE,
        "wandb/b.log": DISK,
        ".git/c.log": DISK,
        "train.py": DISK,
        "job.sbatch": DISK,
        "notes.md": DISK,
    }
    found = of(tmp_path, files)
    assert (ids(found), found.files) == (["invalid_device"], 1)


def test_more_files_than_are_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.analysis.diagnose.logs.MAX_FILES", 3)
    found = of(tmp_path, {f"{i}.log": "step 1 loss 2.0" for i in range(5)})
    assert found.files == 3
    assert "more than 3 files" in found.problems[0].text


def test_files_read_in_parallel_come_back_in_their_order(tmp_path: Path) -> None:
    files = {f"{i}.log": "x\n" * (10 * i) + f"[rank{i}]: {DISK if i % 2 else DEVICE}" for i in range(6)}
    alone = of(tmp_path, files)
    together = diagnose([tmp_path], workers=3)
    assert together == alone
    for finding in together.findings:
        assert all(e.text.startswith(f"[rank{Path(e.file).stem}]") for e in finding.evidence)


def test_events_of_an_earlier_attempt_are_another_story(tmp_path: Path) -> None:
    error = {"event": "error", "rank": 0, "time": 1.7e9, "type": "KeyError", "message": "'labels'", "echo": False}
    start = {"event": "start", "rank": 0, "time": 1.7e9 + 9}
    text = "\n".join(json.dumps(e) for e in (error, start))
    assert ids(of(tmp_path, {"rank0.jsonl": text})) == []
    assert ids(of(tmp_path, {"rank0.jsonl": "\n".join(json.dumps(e) for e in (start, error))})) == ["application_error"]


def test_an_error_that_an_event_calls_an_echo_is_none(tmp_path: Path) -> None:
    def line(rank: int, kind: str, *, echo: bool) -> str:
        event = {"event": "error", "rank": rank, "time": 1.7e9 + 9 - rank, "type": kind, "message": "m", "echo": echo}
        return json.dumps(event, separators=(",", ":"))

    found = of(
        tmp_path, {"rank0.jsonl": line(0, "IndexError", echo=False), "rank1.jsonl": line(1, "ValueError", echo=True)}
    )
    assert (ids(found), found.findings[0].rank) == (["application_error"], 0)
    assert "IndexError" in found.findings[0].cause
    assert not any("ValueError" in line for line in found.story)


HANG = '{"event":"hang","time":1700000009.0,"rank":1,"attempt":1,"kind":"KIND","host":"n1","ranks":[2,3],"where":"x","message":"hang: rank 2 fell out"}'


@pytest.mark.parametrize(
    ("kind", "named"), [("dataloader_hang", "dataloader_hang"), ("of_a_later_version", "collective_hang")]
)
def test_what_the_watch_saw_comes_first_and_its_own_kills_are_no_cause(tmp_path: Path, kind: str, named: str) -> None:
    files = {"rank2.jsonl": HANG.replace("KIND", kind), "n1.exit.json": ends((0, -9, 1.7e9 + 20), (1, -9, 1.7e9 + 20))}
    found = of(tmp_path, files)
    assert ids(found) == [named]
    assert (found.findings[0].rank, found.findings[0].host) == (2, "n1")
    (line,) = found.story  # how the ranks were ended is no news of its own
    assert "rank 2" in line


def test_a_rank_that_ended_itself_without_a_word_is_named_before_those_that_miss_it(tmp_path: Path) -> None:
    """sys.exit(7) leaves no traceback; what rank 0 raises then is an echo, whatever its own exit code."""
    files = {"n1.exit.json": ends((1, 7, 1.7e9), (0, 1, 1.7e9 + 3)), "n0.rank0.log": LOST, "n1.rank1.log": "step 1"}
    found = of(tmp_path, files)
    assert ids(found) == ["application_error"]
    assert (found.findings[0].rank, found.findings[0].host) == (1, "n1")
    assert "exit code 7" in found.findings[0].cause and "without an error" in found.findings[0].title
    assert any("rank 1 on n1: ended with exit code 7" in line for line in found.story)
    echo = {"n1.exit.json": ends((0, 1, 1.7e9)), "n0.rank0.log": LOST}
    assert ids(of(tmp_path / "echo", echo)) == ["peer_died_first"]  # who misses another has said so
    files["n1.rank1.log"] = 'Traceback (most recent call last):\n  File "/x/train.py", line 3, in main\nKeyError: 1'
    assert "exit code 7" not in of(tmp_path, files).findings[0].cause  # it said why


def test_addresses_of_lost_peers_name_one_host_or_none(tmp_path: Path) -> None:
    lost = [LOST.replace("127.0.0.1", a) for a in ("10.7.0.12", "10.7.0.13")]
    found = of(tmp_path, {"n1.rank0.log": lost[0], "n3.rank2.log": lost[1]})
    assert found.findings[0].host not in ("10.7.0.12", "10.7.0.13")
    same = of(tmp_path, {"n3.rank2.log": lost[0]})
    assert same.findings[0].host == "10.7.0.12"
    assert "10.7.0.12" in same.findings[0].cause
    own = of(tmp_path, {"n1.rank0.log": LOST, "n3.rank2.log": LOST})
    assert "127.0.0.1" not in own.findings[0].cause


def test_a_warning_that_names_a_failure_is_no_harmless_one(tmp_path: Path) -> None:
    found = of(tmp_path, {"a.log": "UserWarning: CUDA error: invalid device ordinal"})
    assert (ids(found), found.benign) == (["invalid_device"], [])
    cloned = of(tmp_path, {"a.log": "RuntimeError: Failed to clone() tensor with name base.lora_A"})
    assert (ids(cloned), [b.id for b in cloned.benign]) == ([], ["clone_fallback"])
    more = "Failed to clone() tensor with name base.lora_B\n" * 9 + "RuntimeError: Failed to clone() tensor with name x"
    often = of(tmp_path, {"a.log": more})
    assert (ids(often), often.benign[0].count) == ([], 10)


def test_many_lines_of_one_rank_crowd_out_no_other(tmp_path: Path) -> None:
    lines = [f"[rank0]: 2025-02-04 10:00:09 {DEVICE}"] * 200 + [f"[rank1]: 2025-02-04 10:00:01 {DEVICE}"]
    finding = of(tmp_path, {"a.log": "\n".join(lines)}).findings[0]
    assert (finding.rank, finding.count) == (1, 201)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ('File "/code/x.py", line 3, in save_checkpoint', "checkpoint_collective"),
        ('File "/v/torch/utils/data/dataloader.py", line 3, in _next_data', "dataloader_hang"),
        ('File "/code/x.py", line 3, in forward', "collective_hang"),
    ],
)
@pytest.mark.parametrize("last", [True, False], ids=["with its error", "cut off"])
def test_frames_tell_what_the_rank_was_doing(tmp_path: Path, frame: str, kind: str, last: bool) -> None:
    lines = [f"[rank0]:   {frame}", "[rank0]: torch.distributed.DistBackendError: timeout"][: 2 if last else 1]
    found = of(tmp_path, {"a.log": "\n".join([watchdog(1), *lines, watchdog(0)])})
    assert kind in ids(found) or (kind == "dataloader_hang" and not last), ids(found)
    assert kind != "collective_hang" or ids(found) == [kind]


@pytest.mark.parametrize(
    ("told", "size", "seq", "more", "named"),
    [
        ((0, 1, 3), 4, 900, "", True),
        ((0, 1, 3), 4, 50, "", False),  # so early that the network had shown nothing yet
        ((0,), 4, 900, "", False),  # most are silent: a part of the logs only
        ((0, 1, 3), 4, 900, "[rank0]: Another rank reported a timeout", False),
    ],
)
def test_a_rank_that_did_not_report_is_named_with_care(
    tmp_path: Path, told: tuple[int, ...], size: int, seq: int, more: str, named: bool
) -> None:
    comm = "comm 0x1 rank {r} nranks {size} cudaDev 0"
    files = {f"n.rank{r}.log": comm.format(r=r, size=size) for r in range(size)}
    for r in told:
        files[f"n.rank{r}.log"] += "\n" + watchdog(r, seq=seq)
    files["n.rank0.log"] += "\n" + more
    assert ("collective_mismatch" in ids(of(tmp_path, files))) == named


def test_advice_on_the_path(tmp_path: Path) -> None:
    def advice(*lines: str) -> str:
        both = [f"n{i}:7:7 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{i}<0>" for i in (1, 2)]
        text = "\n".join([*both, *(f"n{i}:7:7 [0] NCCL INFO {line}" for line in lines for i in (1, 2))])
        return " ".join(of(tmp_path, {"a.log": text}).health.advice)

    channel = "Channel 00/0 : 0[0] -> 1[1] via {}"
    assert "host memory (SHM)" in advice(channel.format("SHM/direct/direct"))
    assert "host memory (SHM)" not in advice(channel.format("SHM/direct/direct"), channel.format("P2P/IPC"))
    assert "within one node goes over the network" not in advice(channel.format("NET/IB/0"))
    versions = advice("NCCL version 2.27.3+cuda12.9", "NCCL version 2.21.5+cuda12.4")
    assert "nccl has different versions" in versions
    assert advice("NCCL version 2.27.3+cuda12.9") == ""


def shown(found: Diagnosis, width: int = 100) -> str:
    import click

    from allranks.analysis.diagnose.terminal import diagnosis_lines

    return "\n".join(click.unstyle(line) for line in diagnosis_lines(found, width))


def test_what_a_person_is_shown(tmp_path: Path) -> None:
    causes = [DEVICE, DISK, "ModuleNotFoundError: No module named 'peft'", "bind: Address already in use", oom()]
    files = {f"n{i}.rank{i}.log": f"[2025-02-04 10:00:0{i},000] {text}" for i, text in enumerate(causes)}
    files |= {f"x{i}.log": "\x00\x01\x02\x03" * 2000 for i in range(14)}
    files["n0.rank0.log"] += f" {'y' * 250}" + "\nFutureWarning: x is deprecated" * 3
    diagnosis = of(tmp_path, files)
    text = shown(diagnosis, 80)
    assert len(diagnosis.findings) == 5 and all(f.id in text for f in diagnosis.findings)
    for part in (
        "or perhaps",
        "less likely: ",
        f"and {len(diagnosis.problems) - 12} more",
        "(3 times)",
        "In order of time:",
        " ...",
    ):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()[1:]) <= 80  # the first is one line for a pager
