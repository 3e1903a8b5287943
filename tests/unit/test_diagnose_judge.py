"""Causes are told from echoes, the first from the later, one kind of timeout from another."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnose_examples import DEVICE, DISK, STEPS, ids, of, oom

WATCHDOG = (
    "[rank{rank}]:[E204 03:04:05.000001 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={out}, Timeout(ms)=600000) ran for 600011 "
    "milliseconds before timing out."
)
STATUS = (
    "[rank{rank}]:[E204 03:04:06.000002 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0 Rank {rank}] failure detected by "
    "watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed work: {done}"
)
IDLE = (
    "[rank{rank}]:[E204 03:04:06.000001 ProcessGroupNCCL.cpp:1987] [PG ID {group} PG GUID {group}(default_pg) Rank "
    "{rank}] Received a dump signal due to a collective timeout from  rank {first} and we will try our best to dump the"
    " debug info. Last enqueued NCCL work: {seq}, last completed NCCL work: {seq}."
)
WRAPPED = (
    "[rank{r}]:[E204 03:04:05.000001 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout:"
    "\n[rank{r}]: WorkNCCL(SeqNum=900, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600011 "
    "milliseconds before timing out."
)
LOST = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24273."


def watchdog(rank: int, seq: int = 900, op: str = "ALLREDUCE", size: int = 1024, out: int | None = None) -> str:
    return WATCHDOG.format(rank=rank, seq=seq, op=op, size=size, out=size if out is None else out)


def waits(seq: int, done: int, op: str = "ALLREDUCE") -> list[str]:
    return [line for r in (0, 1) for line in (watchdog(r, seq, op), STATUS.format(rank=r, seq=seq, done=done))]


def idle(group: int, seq: int, first: int = 0) -> list[str]:
    return [IDLE.format(rank=r, group=group, seq=seq, first=first) for r in (2, 3)]


def silent_but(*ranks: int, seq: int = 900, more: str = "") -> dict[str, str]:
    """The logs of four ranks, of which these report a timeout."""
    comm = "comm 0x1 rank {} nranks 4 cudaDev 0\n{}"
    files = {f"n.rank{r}.log": comm.format(r, watchdog(r, seq) if r in ranks else "") for r in range(4)}
    return files | {"more.log": more}


def gave_up(state: str) -> dict[str, str]:
    reason = f"n1, the job's first node, where rank 0 ran, has recorded nothing: Slurm reports it as mixed ({state})."
    return {"driver.json": json.dumps({"gave_up": reason}, indent=1), "n2.rank1.log": "step 3 loss 0.2"}


def frames(*places: tuple[str, str]) -> list[str]:
    return [f'  File "/env/{path}", line 5, in {function}' for path, function in places]


CANCELLED = "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2025-02-04T03:05:00 ***"
PREEMPTED = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 DUE TO PREEMPTION ***"
PEFT = "ModuleNotFoundError: No module named 'peft'"
CRASH = "  exitcode  : -11 (pid: 7)\n  traceback : Signal 11 (SIGSEGV) received by PID 7"
ABORT = "  exitcode  : -6 (pid: 7)\n  traceback : Signal 6 (SIGABRT) received by PID 7"
AWAY = (
    "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
    "connect to (n1, 1)."
)
BARE = "RuntimeError: NCCL communicator: something"
OPTIMIZER = '  File "/v/torch/optim/adamw.py", line 5, in _multi_tensor_adamw'
BARRIER = '  File "/v/torch/distributed/distributed_c10d.py", line 3, in barrier'
HOST_OOM = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: 9 bytes."
SPARE, NONE_FREE = oom(want="20.00 MiB", free="71.00 GiB"), oom(want="20.00 MiB", free="10.00 MiB")
# some optimizers call forward and backward themselves: what runs out there is not their state
CLOSURE = frames(
    ("torch/optim/optimizer.py", "wrapper"), ("torch/optim/adamw.py", "step"), ("run/precision.py", "_wrap_closure"),
    ("run/automatic.py", "closure"),
)  # fmt: skip
LINEAR, SGD = frames(("torch/nn/modules/linear.py", "forward"), ("torch/optim/sgd.py", "_multi_tensor_x"))
SAVES = '[rank{}]:   File "/code/x.py", line 3, in save_checkpoint'
BEGUN = "INFO Saving model checkpoint to /out/step-100"
ENDED = "INFO checkpoint saved in 3 s\nstep 101 loss 2.0"
FRAMES = (
    ('[rank0]:   File "/code/x.py", line 3, in save_checkpoint', "checkpoint_collective", 0),
    ('[rank0]:   File "/v/torch/utils/data/dataloader.py", line 3, in _next_data', "dataloader_hang", 0),
    ('[rank0]:   File "/code/x.py", line 3, in forward', "collective_hang", None),
)
END = "[rank0]: torch.distributed.DistBackendError: timeout"
MAY_INDICATE = "[rank2]: This may indicate a possible application crash on rank {} or a network set up issue."
SETTING_UP = "[rank1]: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d"
LMOD = 'Lmod has detected the following error: The following module(s) are unknown: "tools"'
DENIED = "PermissionError: [Errno 13] Permission denied: '/data/out'"
KILLED, FORCED = "srun: error: n1: task 0: Killed", "srun: forcing job termination"
SOCKET, SECOND = (f"n{n}:7:7 [0] NCCL INFO Using network Socket" for n in (1, 2))
NO_IB = "n1:7:7 [0] NCCL INFO NET/IB : No device found."
WANTS_IB = "n1:7:7 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0."
WANTS_ETH = "n1:7:7 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0."
OVER_TCP = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
WITHIN = "NCCL INFO Using network Socket\nNCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
IB_OFF = "NCCL INFO NCCL_IB_DISABLE set by environment to 1."
NO_SHM, SLOW = "n1:1:1 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1.", "# Avg bus bandwidth    : 0.4"
APART = "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/IB/0\nn2:1:1 [0] NCCL INFO Using network IB"
TOGETHER = "n1:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"
BRIDGE, BRIDGE_2 = (f"n{n}:7:7 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>" for n in (1, 2))
READY = "n1:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE"
ADDRESS = "allranks 12:34:16 node 1 = n2 eno1 10.7.0.12: ranks 1-1\nsrun: error: n3: task 2: Exited with exit code 1"
NODE_FAILURE = (
    f"allranks 12:34:16 node 0 = n1 eth0 10.7.0.11: ranks 0-0\n{ADDRESS}\nslurmstepd-n1: error: *** JOB 6 ON n1 "
    "CANCELLED AT 2026-11-26T05:48:11 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***"
)
AWAY_N2, AWAY_N3 = (LOST.replace("127.0.0.1", f"10.7.0.{n}") for n in (12, 13))
LOST_BY_BOTH = {"n1.rank0.log": AWAY_N2, "n3.rank2.log": AWAY_N2}
SILENT = {"n2.rank1.log": "step 3 loss 0.2"}
ALL_STEP = dict.fromkeys(LOST_BY_BOTH | SILENT, "step 3 loss 0.2")
TORN = f"{LOST}\n\nDuring handling of the above exception, another exception occurred:\n\nIndexError: list index"
NO_PART = "[Errno 2] No such file or directory: '/data/cache/.part.113-ac6d.tmp' -> None"
TASK_0, TASKS = "srun: error: n1: task 0: Terminated", "srun: error: n1: tasks 0-3: Terminated"
WAITS = watchdog(0).replace("[Rank 0]", "[PG ID 0 PG GUID 0(default_pg) Rank 0]")
LABELS = "KeyError: 'labels'"
ECHOES = {f"a.rank{r}.log": watchdog(r) for r in range(15)}
TWO = {"a": f"[2025-02-04 10:00:09,0] [rank0] {DISK}", "b": f"[2025-02-04 10:00:01,0] [rank1] {DEVICE}"}


@pytest.mark.parametrize(
    ("logs", "named", "rank", "says"),
    [
        # how causes weigh against each other
        ([DEVICE, "srun: error: n2: task 5: Exited with exit code 1"], ["invalid_device"], 5, ""),
        ([LOST, "Failed to initialize NVML"], ["no_gpu"], None, ""),
        ([AWAY], ["rendezvous_unreachable"], 1, ""),
        ([AWAY, "[rank0]: bind: Address already in use"], ["port_in_use"], 0, ""),
        ([PREEMPTED, CANCELLED], ["slurm_preempted"], None, ""),
        ([watchdog(0), CRASH], ["rank_died"], None, ""),
        ([watchdog(0), ABORT], ["collective_hang"], 0, ""),
        ([DEVICE, f"[rank1]: {LABELS}"], ["invalid_device", "application_error"], None, ""),
        ([LABELS, *(f"step {n}/9 loss 1.0" for n in (2, 3, 4))], [], None, ""),
        (["step 2/9 loss 1.0", LABELS], ["application_error"], None, ""),
        ([STEPS, f"[rank1]: {LABELS}", "step 31/900 loss 1.2"], ["application_error"], 1, ""),  # a step of another rank
        ([BARE], ["collective_hang"], None, "does not say why"),
        ([BARE, DEVICE], ["invalid_device"], None, ""),
        (["misc/ibvwrap.cc:7 ibv_modify_qp failed"], [], None, ""),
        ([MAY_INDICATE.format(1)], ["peer_died_first"], 1, "rank 1 disconnected"),
        ([SETTING_UP], ["peer_died_first"], 0, ""),
        ([*(f"{r}: [rank{r}]: working" for r in range(3)), f"3: [rank3]: {DEVICE}"], ["invalid_device"], 3, ""),
        ([LMOD, DENIED], ["output_not_writable", "library_missing"], None, ""),
        ([LMOD], ["library_missing"], None, ""),
        ([CANCELLED], ["slurm_cancelled"], None, ""),
        ([PEFT, CANCELLED], ["library_missing"], None, ""),
        ([FORCED, KILLED], [], None, ""),  # by srun, not for memory
        ([KILLED, "srun: Terminating StepId=7.0"], ["host_oom"], None, ""),
        # one rank's own failure beats the echo of fifteen; of equal ones the earliest counts
        (ECHOES | {"b.rank15.log": f"[2025-02-04 03:00:00,000] step\n{oom()}"}, ["cuda_oom"], (15, "b"), ""),
        (TWO, ["invalid_device", "disk_full"], 1, ""),
        # collectives that timed out
        (waits(1, -1, "BROADCAST"), ["first_collective_failed"], None, ""),
        (waits(900, 899), ["collective_hang"], None, ""),
        ([watchdog(0), watchdog(1, op="BROADCAST"), watchdog(2)], ["collective_mismatch"], 0, "rank 1: BROADCAST"),
        ([watchdog(0, op="_ALLGATHER_BASE", size=300_000_000, out=4_800_000_000)], ["checkpoint_collective"], 0, ""),
        ([BEGUN, watchdog(0)], ["checkpoint_collective"], 0, ""),
        ([BEGUN, ENDED, watchdog(0)], ["collective_hang"], 0, ""),
        ([WRAPPED.format(r=0, op="ALLREDUCE"), WRAPPED.format(r=1, op="BROADCAST")], ["collective_mismatch"], 0, ""),
        ([watchdog(r, op="ALLTOALL", size=10 + r) for r in (0, 1)], ["collective_hang"], None, ""),
        ([watchdog(r, op="COALESCED", size=10 + r) for r in (0, 1)], ["collective_hang"], None, ""),
        ([watchdog(r, op="ALLGATHER", size=10 + r) for r in (0, 1)],
         ["collective_mismatch"], 0, "rank 0: 10, rank 1: 11"),
        ([watchdog(0, 901), watchdog(1, op="BROADCAST"), watchdog(2, 901)], ["collective_mismatch"], 1, ""),
        ([watchdog(0, 500), watchdog(0, 700, "BROADCAST")], ["collective_mismatch"], 0, "several groups at once"),
        ([watchdog(0), watchdog(1), SAVES.format(0), SAVES.format(1)], ["checkpoint_collective"], None, ""),
        *(([watchdog(1), f, *end, watchdog(0)], [kind], r, "") for f, kind, r in FRAMES for end in ([END], [])),
        # ranks that never called it are named: in the same group only, and where they had called less
        ([WAITS, *idle(0, 899)], ["collective_mismatch"], 2, "rank 2, 3 had completed"),
        ([WAITS, *idle(1, 899)], ["collective_hang"], 0, ""),
        ([WAITS, *idle(0, 900)], ["collective_hang"], 0, ""),
        (idle(0, 899, first=7), ["peer_died_first"], 7, ""),
        # a rank that did not report: not early, when the network has shown nothing, nor where most are silent
        (silent_but(0, 1, 3), ["collective_mismatch"], 2, "rank 2 did not"),
        (silent_but(0, 1, 3, seq=50), ["collective_hang"], None, ""),
        (silent_but(0), ["collective_hang"], 0, ""),
        (silent_but(0, 1, 3, more="[rank0]: Another rank reported a timeout"), ["collective_hang"], None, ""),
        # memory
        (["[rank0]: optimizer.step()", oom("[rank0]: ")], ["cuda_oom_optimizer_step"], 0, ""),
        (["[rank1]: optimizer.step()", oom("[rank0]: ")], ["cuda_oom"], 0, ""),
        ([oom(want="20.00 MiB", free="500.00 MiB")], ["cuda_oom"], None, ""),
        ([SPARE], ["gpu_hardware_fault", "cuda_oom"], None, ""),
        ([SPARE, NONE_FREE], ["cuda_oom"], None, ""),
        ([BARRIER, "RuntimeError: CUDA error: out of memory"], ["gpu_hardware_fault", "cuda_oom"], None, "first"),
        ([OPTIMIZER, HOST_OOM], ["host_oom"], None, "optimizer's step"),
        ([OPTIMIZER, "ValueError: a", *["quiet"] * 80, "step 7/9 loss 2.0", oom()],
         ["cuda_oom", "application_error"], None, ""),
        ([OPTIMIZER, *["quiet"] * 250, oom()], ["cuda_oom"], None, ""),
        ([f"{r}: {line}" for r in (0, 1) for line in (OPTIMIZER, oom())], ["cuda_oom_optimizer_step"], None, ""),
        ([SGD, oom()], ["cuda_oom_optimizer_step"], None, ""),
        ([*CLOSURE, LINEAR, oom()], ["cuda_oom"], None, ""),
        ([*CLOSURE, OPTIMIZER, oom()], ["cuda_oom_optimizer_step"], None, ""),
        ([LINEAR, oom()], ["cuda_oom"], None, ""),
        # the path of the data: sockets are a finding only where RDMA was expected
        (["n1:7:7 [0] NCCL WARN Call to ibv_open_device failed", SOCKET], ["silent_socket_fallback"], None, ""),
        ([WANTS_IB, NO_IB, SOCKET], [], None, ""),  # one node, and nothing that broke
        ([WANTS_ETH, NO_IB, SOCKET, SECOND], [], None, ""),  # nobody asked for RDMA
        ([WANTS_IB, SOCKET, SECOND], [], None, ""),  # it was not missing
        ([WANTS_IB, NO_IB, SOCKET, SECOND], ["silent_socket_fallback"], None, ""),
        ([WANTS_IB, NO_IB, OVER_TCP], ["silent_socket_fallback"], None, ""),
        ([IB_OFF, NO_IB, OVER_TCP], [], None, ""),
        ([NO_IB, WITHIN], [], None, ""),
        ([BRIDGE, BRIDGE_2], ["wrong_interface"], None, ""),
        ([BRIDGE, BRIDGE_2, READY], [], None, ""),
        ([BRIDGE], [], None, ""),
        *(([text, APART], [], None, "") for text in (NO_SHM, SLOW)),
        *(([text, TOGETHER], ["slow_transport"], None, "") for text in (NO_SHM, SLOW)),
        # tasks of Slurm are ranks only where there are more than nodes
        (["srun: error: n2: task 1: Segmentation fault", TASK_0], ["rank_died"], (None, "n2"), ""),
        (["srun: error: n2: task 5: Segmentation fault", TASKS], ["rank_died"], (5, "n2"), ""),
        # tear-down raises errors of its own, which name themselves as clearly as the cause does
        ({"a.rank0.log": TORN, "a.rank1.log": TORN, "a.rank2.log": LABELS}, ["application_error"], 2, "labels"),
        # the others name an address; the rank that says nothing or the launcher's lines tell whose it is
        (LOST_BY_BOTH | SILENT, ["peer_died_first"], (1, "n2"), ""),
        (LOST_BY_BOTH | {"slurm.log": ADDRESS}, ["peer_died_first"], (None, "n2"), ""),
        ({"n1.rank0.log": AWAY_N2, "n3.rank2.log": AWAY_N3}, ["peer_died_first"], (None, None), "a peer disconnected"),
        ({"n3.rank2.log": AWAY_N2}, ["peer_died_first"], (None, "10.7.0.12"), "10.7.0.12"),
        ({"n1.rank0.log": LOST, "n3.rank2.log": LOST}, ["peer_died_first"], (None, None), "a peer disconnected"),
        (LOST_BY_BOTH | {"slurm.log": "srun: error: Node failure on n2"}, ["node_unhealthy"], (None, "n2"), ""),
        # the batch script's node prints the message of a node that failed, and is not that node
        (LOST_BY_BOTH | SILENT | {"slurm.log": NODE_FAILURE}, ["node_unhealthy"], (None, "n2"), ""),
        (ALL_STEP | {"slurm.log": NODE_FAILURE}, ["node_unhealthy"], (None, None), ""),
        # the record of the command that waited: the driver was on the first node
        (gave_up("it does not answer on the network (No route to host)"), ["node_unhealthy"], (None, "n1"), ""),
        (gave_up("its slurmd answers, so the node is not lost"), [], None, ""),
        ({"n1.rank0.log": NO_PART}, ["dataset_race"], 0, ""),
        ({"n1.rank0.log": f"the record of this node cannot be written: {NO_PART}"}, [], None, ""),
    ],
)  # fmt: skip
def test_what_lines_name_together(tmp_path: Path, logs: Any, named: list[str], rank: Any, says: str) -> None:
    diagnosis = of(tmp_path, logs if isinstance(logs, dict) else "\n".join(logs))
    assert ids(diagnosis) == named
    if named:
        first = diagnosis.findings[0]
        assert ((first.rank, first.host) if isinstance(rank, tuple) else first.rank) == rank
        assert says in first.cause
        assert first.id != "collective_hang" or first.confidence < 0.9  # it abstains


WARNING = (
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [a]:29400 (errno: 111 - Connection refused)."
)


def test_warning_that_the_job_survived_is_harmless(tmp_path: Path) -> None:
    assert ids(of(tmp_path, WARNING)) == ["rendezvous_unreachable"]
    survived = of(tmp_path, f"{WARNING}\nstep 1/10 loss 2.5")
    assert (survived.findings, survived.benign[0].id) == ([], "recovered_rendezvous_unreachable")
    again = of(tmp_path, f"{WARNING}\nstep 1/10 loss 2.5\n{WARNING}")
    assert (ids(again), again.benign, again.findings[0].count) == (["rendezvous_unreachable"], [], 2)


def test_health_of_a_good_log(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "n1:10:10 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
            "n1:10:10 [0] NCCL INFO Bootstrap : Using eno1:10.0.0.1<0>",
            "n1:10:10 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init START",
            *(f"n1:10:12 [0] NCCL INFO Channel {c:02d}/0 : 0[0] -> 1[1] via P2P/IPC" for c in range(24)),
            "n1:10:12 [0] NCCL INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels",
            "n1:10:10 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE",
        ]
    )
    h = of(tmp_path, text).health
    assert (h.world_size, h.hosts, h.channels, h.communicators_ready, h.interfaces) == (2, ["n1"], 24, 1, ["eno1"])
    assert (h.transports, h.versions) == ({"P2P/IPC": 24}, {"nccl": ["2.27.3+cuda12.9"]})


def test_advice_on_the_path(tmp_path: Path) -> None:
    def advice(*lines: str) -> str:
        both = [f"n{i}:7:7 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{i}<0>" for i in (1, 2)]
        text = "\n".join([*both, *(f"n{i}:7:7 [0] NCCL INFO {line}" for line in lines for i in (1, 2))])
        return " ".join(of(tmp_path, text).health.advice)

    channel = "Channel 00/0 : 0[0] -> 1[1] via {}"
    assert "host memory (SHM)" in advice(channel.format("SHM/direct/direct"))
    assert "host memory (SHM)" not in advice(channel.format("SHM/direct/direct"), channel.format("P2P/IPC"))
    assert "within one node goes over the network" not in advice(channel.format("NET/IB/0"))
    assert "nccl has different versions" in advice("NCCL version 2.27.3+cuda12.9", "NCCL version 2.21.5+cuda12.4")
    assert advice("NCCL version 2.27.3+cuda12.9") == ""
    ethernet = of(tmp_path, f"{NO_IB}\n{OVER_TCP}")  # what any Ethernet cluster says: a note, no finding
    assert not ethernet.findings and "TCP sockets" in ethernet.health.advice[0]


def test_scheduler_kernel_and_ranks_are_joined(tmp_path: Path) -> None:
    """A rank that the kernel killed: named by srun and dmesg; the others only lost it; the table of sacct agrees."""
    lost = (
        "[rank{}]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    )
    files = {f"n{r // 4 + 1}.rank{r}.log": lost.format(r) for r in range(8) if r != 5}
    files["n2.rank5.log"] = "2025-05-05 10:20:00 step 88 loss 1.2"
    files["slurm-4711.out"] = (
        "2025-05-05 10:00:00 starting\nsrun: error: n2: task 5: Killed\nsrun: Terminating StepId=4711.0\n"
        "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2025-05-05T10:20:31 ***\nsrun: error: n1: tasks 0-3: "
        "Terminated"
    )
    files["sacct.txt"] = "JobID|State|ExitCode|End\n4711|OUT_OF_MEMORY|0:125|2025-05-05T10:20:33"
    files["n2.dmesg"] = "May  5 10:20:29 n2 kernel: Memory cgroup out of memory: Killed process 8812 (python3)"
    files["n2.slurmd.log"] = "[2025-05-05T10:20:30.000] [4711.0] error: Detected 1 oom_kill event in StepId=4711.0."
    found = of(tmp_path, files)
    assert [(f.id, f.rank, f.host) for f in found.findings] == [("host_oom", 5, "n2")]
    times = [line.split("  ")[0][-8:] for line in found.story]
    assert times == sorted(times) and "10:00:00" not in times
    assert "10:20:29  n2: host memory" in found.story[0]


def test_a_kill_is_put_down_to_memory_only_as_far_as_the_logs_say_so(tmp_path: Path) -> None:
    bare = of(tmp_path, "failed (exitcode: -9) local_rank: 2 (pid: 4174) of binary: /usr/bin/python").findings[0]
    assert bare.id == "host_oom" and bare.confidence < 0.7
    assert "somebody may have sent the signal" in bare.against[0]
    shown = of(tmp_path, {"n1.dmesg": "[12.3] Memory cgroup out of memory: Killed process 4174 (python)"}).findings[0]
    assert shown.confidence > 0.9 and not shown.against


PARAMS = (
    "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 9 params,\n    while rank 0 has inconsistent"
)
XID, IBVWRAP = "[ 10.5] NVRM: Xid (PCI:0000:c1:00): ", "n1:1:1 [0] misc/ibvwrap.cc:262"
ESCAPED = "Error: Traceback (most recent call last):\\n  File \"x.py\", line 1, in f\\nKeyError: 'k'"
SYSLOG_TIMES = ("Jan 12 10:00:01", "2025-01-12T10:00:01.123456+01:00")
OFI = "NCCL INFO NET/OFI Could not disable CUDA API usage\nNCCL INFO Using network"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file", []),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/nccl-Ab12Cd'", ["shm_removed"]),
        ("gpu burn test on node-3: FAILED", ["node_unhealthy"]),
        ("RuntimeError: Distributed package doesn't have NCCL built in", ["library_missing"]),
        ("ValueError: Free memory on device cuda:1 (3.1/79.2 GiB) on startup is less than desired", ["cuda_oom"]),
        ("rank 2 crashed with exit code 1", []),
        ("rank 2 crashed", ["rank_died"]),
        ("     \u00d7 slurmctld.service - Slurm controller daemon", ["slurm_controller_error"]),
        ("     ● slurmctld.service - Slurm controller daemon", []),
        ("RuntimeError: use_libuv was requested but PyTorch was built", ["library_missing"]),
        ("n1:1:1 [0] NCCL WARN Call to ibv_modify_qp failed with error No such device errno 19", ["rdma_unreachable"]),
        ("NCCL WARN Rank 1 could not open mlx5_2 (errno 2). Restrict NCCL_IB_HCA.", ["rdma_unreachable"]),
        ("NCCL INFO NCCL_IB_HCA set by environment to mlx5", []),
        ("mlx5_core 0000:c1:00.0 eth0: TX timeout on queue: 25, SQ: 0x2bb", ["broken_node_network"]),
        ("NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory : CUDA error 401", ["fabric_manager"]),
        ("RuntimeError: unable to allocate shared memory(shm) for file", ["shm_too_small"]),
        (f"{OFI} AWS Libfabric", []),
        (f"{OFI} Socket", ["silent_socket_fallback"]),
        ("NVML: Unable to retrieve NVLink information as all links are inActive", []),
        ("NVRM: NVLink 3 of GPU 2 is down", ["gpu_hardware_fault"]),
        ("4711   train   gpu   lab   8 CANCELLED+      0:0", ["slurm_cancelled"]),
        ("4711_3   train   gpu   lab   8 CANCELLED      0:15", ["slurm_cancelled"]),
        ("4711.batch   batch   lab   8 CANCELLED      0:15", []),
        ("  ran for 600011 milliseconds before timing out", ["collective_hang"]),
        ("Last enqueued NCCL work: 2, last completed NCCL work: -1", ["first_collective_failed"]),
        ("Last enqueued NCCL work: -1, last completed NCCL work: -1", []),
        ("Last enqueued NCCL work: 2, last completed NCCL work: 2", []),
        ("fused.so: cannot open shared object file: No such file or directory, falling back to the plain kernel", []),
        # messages on two lines
        (f"{IBVWRAP} NCCL WARN\nCall to ibv_reg_mr failed with error Cannot allocate memory", ["memlock_limit"]),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of\n[rank0]: memory. Tried to allocate 2.00 GiB", ["cuda_oom"]),
        ("[rank0]: RuntimeError: CUDA error: invalid\n[rank1]: ok\n[rank0]: device ordinal", ["invalid_device"]),
        (ESCAPED, ["application_error"]),
        # behind a prefix of syslog
        *((f"{time} node-c app[77]: bind: Address already in use", ["port_in_use"]) for time in SYSLOG_TIMES),
        # a part of a word, or another emitter
        ("NET/OFI configured attributes handshake completed", []),
        ("process 12 reached the unreachable code path table", []),
        ("RuntimeError: Invalid partition of the graph", ["application_error"]),
        # harmless values of structured messages
        (f"{XID}45, pid=77, name=python, Ch 00000010", []),
        (f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x0 (None)", []),
        ("nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 12028, Non-fatal, Link 31", []),
        ("4711 train COMPLETED 0:0", []),
        ("job ended with exit code 0", []),
        (f"{PARAMS} 0 params.", ["first_collective_failed"]),
        (f"{PARAMS} 8 params.", ["model_differs_between_ranks"]),
    ],
)
def test_one_line_is_told_from_its_neighbour(tmp_path: Path, text: str, named: list[str]) -> None:
    assert ids(of(tmp_path, text))[:1] == named
