"""Causes are told from echoes, the first from the later, one kind of timeout from another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose

WATCHDOG = (
    "[rank{rank}]:[E204 03:04:{second:02d}.000001 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={out}, Timeout(ms)=600000) ran "
    "for 600011 milliseconds before timing out."
)
STATUS = (
    "[rank{rank}]:[E204 03:04:{second:02d}.000002 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0 Rank {rank}] failure "
    "detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed work: {done}"
)


def watchdog(
    rank: int, seq: int = 900, op: str = "ALLREDUCE", size: int = 1024, out: int | None = None, second: int = 5
) -> str:
    return WATCHDOG.format(rank=rank, seq=seq, op=op, size=size, out=size if out is None else out, second=second)


def _diagnose(tmp_path: Path, files: dict[str, str]) -> Diagnosis:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    return diagnose([tmp_path])


def _ids(diagnosis: Diagnosis) -> list[str]:
    return [f.id for f in diagnosis.findings]


def test_own_failure_of_one_rank_beats_the_echo_of_all_others(tmp_path: Path) -> None:
    """Fifteen ranks report a timeout and one an error of memory, later by its node's clock: the one is the cause."""
    files = {f"node-a.rank{r}.log": watchdog(r, second=1) for r in range(15)}
    files["node-b.rank15.log"] = (
        "[2025-02-04 09:00:00,001] step\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB"
    )
    found = _diagnose(tmp_path, files)
    assert _ids(found) == ["cuda_oom"]
    assert (found.findings[0].rank, found.findings[0].host) == (15, "node-b")


def test_earliest_of_equally_strong_causes_comes_first(tmp_path: Path) -> None:
    early = "[2025-02-04 10:00:01,000] [rank1] RuntimeError: CUDA error: invalid device ordinal"
    late = "[2025-02-04 10:00:09,000] [rank0] OSError: [Errno 28] No space left on device: 'x'"
    found = _diagnose(tmp_path, {"a.log": late, "b.log": early})
    assert _ids(found)[:2] == ["invalid_device", "disk_full"]


def test_first_collective_that_never_ended(tmp_path: Path) -> None:
    text = "\n".join(
        watchdog(r, seq=1, op="BROADCAST") + "\n" + STATUS.format(rank=r, second=6, seq=1, done=-1) for r in range(2)
    )
    assert _ids(_diagnose(tmp_path, {"a.log": text})) == ["first_collective_failed"]


def test_later_collective_abstains(tmp_path: Path) -> None:
    text = "\n".join(watchdog(r) + "\n" + STATUS.format(rank=r, second=6, seq=900, done=899) for r in range(2))
    found = _diagnose(tmp_path, {"a.log": text})
    assert _ids(found) == ["collective_hang"]
    assert found.findings[0].confidence <= 0.8  # of the abstention, which is right more often than not


def test_ranks_in_unlike_collectives(tmp_path: Path) -> None:
    text = "\n".join([watchdog(0), watchdog(1, op="BROADCAST"), watchdog(2)])
    found = _diagnose(tmp_path, {"a.log": text})
    assert _ids(found)[0] == "collective_mismatch"
    assert "rank 1: BROADCAST" in found.findings[0].cause


def test_gather_of_a_whole_model(tmp_path: Path) -> None:
    huge = watchdog(0, op="_ALLGATHER_BASE", size=300_000_000, out=4_800_000_000)
    assert _ids(_diagnose(tmp_path, {"a.log": huge}))[0] == "checkpoint_collective"


def test_save_that_was_begun_and_not_ended(tmp_path: Path) -> None:
    begun = "INFO Saving model checkpoint to /out/step-100"
    assert _ids(_diagnose(tmp_path, {"a.log": begun + "\n" + watchdog(0)}))[0] == "checkpoint_collective"


def test_save_that_ended_is_not_blamed(tmp_path: Path) -> None:
    begun = "INFO Saving model checkpoint to /out/step-100\nINFO checkpoint saved in 3 s\nstep 101 loss 2.0"
    assert _ids(_diagnose(tmp_path, {"a.log": begun + "\n" + watchdog(0)})) == ["collective_hang"]


@pytest.mark.parametrize("frame", ["torch/optim/adamw.py", "torch/optim/sgd.py"])
def test_memory_in_the_optimizer_step(tmp_path: Path, frame: str) -> None:
    text = (
        f'  File "/env/{frame}", line 5, in _multi_tensor_x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to '
        "allocate 1.00 GiB"
    )
    assert _ids(_diagnose(tmp_path, {"a.log": text})) == ["cuda_oom_optimizer_step"]


def test_memory_that_the_optimizers_closure_wants_is_not_the_optimizers(tmp_path: Path) -> None:
    """Some optimizers call forward and backward themselves: what runs out there is not their state."""
    step = [
        ("torch/optim/optimizer.py", "wrapper"),
        ("torch/optim/adamw.py", "step"),
        ("run/precision.py", "_wrap_closure"),
    ]
    model = [("run/automatic.py", "closure"), ("torch/nn/modules/linear.py", "forward")]
    state = [("torch/optim/adamw.py", "_multi_tensor_adamw")]
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB"
    for name, frames, found in (
        ("a", step + model, "cuda_oom"),
        ("b", step + model[:1] + state, "cuda_oom_optimizer_step"),
    ):
        (tmp_path / name).mkdir()
        text = "\n".join([*(f'  File "/env/{path}", line 5, in {function}' for path, function in frames), oom])
        assert _ids(_diagnose(tmp_path / name, {"a.log": text})) == [found]


def test_unknown_module_gives_way_to_what_ended_the_job(tmp_path: Path) -> None:
    lmod = 'Lmod has detected the following error: The following module(s) are unknown: "tools"'
    found = _diagnose(tmp_path, {"a.log": f"{lmod}\nPermissionError: [Errno 13] Permission denied: '/data/out'"})
    assert _ids(found) == ["output_not_writable", "library_missing"]
    (tmp_path / "a.log").write_text(lmod)
    assert _ids(diagnose([tmp_path])) == ["library_missing"]


IDLE = (
    "[rank{rank}]:[E204 03:04:06.000001 ProcessGroupNCCL.cpp:1987] [PG ID {group} PG GUID {group}(default_pg) Rank "
    "{rank}] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the "
    "debug info. Last enqueued NCCL work: {seq}, last completed NCCL work: {seq}."
)


@pytest.mark.parametrize(
    ("group", "seq", "found"),
    [(0, 899, "collective_mismatch"), (1, 899, "collective_hang"), (0, 900, "collective_hang")],
    ids=["behind", "another group", "not behind"],
)
def test_ranks_that_never_called_it_are_named(tmp_path: Path, group: int, seq: int, found: str) -> None:
    """Only in the same group, and only where they had called less than the one that waits."""
    waits = watchdog(0).replace("[Rank 0]", "[PG ID 0 PG GUID 0(default_pg) Rank 0]")
    text = "\n".join([waits, *(IDLE.format(rank=r, group=group, seq=seq) for r in (2, 3))])
    first = _diagnose(tmp_path, {"a.log": text}).findings[0]
    assert first.id == found
    if found == "collective_mismatch":
        assert first.rank == 2
        assert "rank 2, 3 had completed" in first.cause


def test_memory_elsewhere(tmp_path: Path) -> None:
    text = (
        '  File "/env/torch/nn/linear.py", line 5, in forward\ntorch.OutOfMemoryError: CUDA out of memory. Tried to '
        "allocate 1.00 GiB"
    )
    assert _ids(_diagnose(tmp_path, {"a.log": text})) == ["cuda_oom"]


def test_out_of_memory_with_memory_to_spare_may_be_the_gpu(tmp_path: Path) -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 71.00 GiB is free."
    )
    assert "gpu_hardware_fault" in _ids(_diagnose(tmp_path, {"a.log": text}))


def test_abort_by_the_watchdog_is_no_crash(tmp_path: Path) -> None:
    text = watchdog(0) + "\n  exitcode  : -6 (pid: 7)\n  traceback : Signal 6 (SIGABRT) received by PID 7"
    assert _ids(_diagnose(tmp_path, {"a.log": text})) == ["collective_hang"]


def test_cancel_after_a_failure_is_its_echo(tmp_path: Path) -> None:
    cancel = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 ***"
    assert _ids(_diagnose(tmp_path, {"a.log": cancel})) == ["slurm_cancelled"]
    assert _ids(_diagnose(tmp_path, {"a.log": "ModuleNotFoundError: No module named 'peft'\n" + cancel})) == [
        "library_missing"
    ]


def test_warning_that_the_job_survived_is_harmless(tmp_path: Path) -> None:
    warning = (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node-a]:29400 (errno: 111 - Connection "
        "refused)."
    )
    assert _ids(_diagnose(tmp_path, {"a.log": warning})) == ["rendezvous_unreachable"]
    found = _diagnose(tmp_path, {"a.log": warning + "\nstep 1/10 loss 2.5"})
    assert not found.findings
    assert found.benign[0].id == "recovered_rendezvous_unreachable"


def test_sockets_are_a_finding_only_where_rdma_was_expected(tmp_path: Path) -> None:
    none = "NCCL INFO NET/IB : No device found."
    used = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
    local = "NCCL INFO Using network Socket\nNCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
    off = "NCCL INFO NCCL_IB_DISABLE set by environment to 1."
    asked = "NCCL INFO NCCL_IB_HCA set by environment to mlx5"
    assert _ids(_diagnose(tmp_path, {"a.log": f"{asked}\n{none}\n{used}"})) == ["silent_socket_fallback"]
    plain = _diagnose(tmp_path, {"a.log": f"{none}\n{used}"})  # what any Ethernet cluster says: a note, no finding
    assert not plain.findings
    assert "TCP sockets" in plain.health.advice[0]
    assert _ids(_diagnose(tmp_path, {"a.log": f"{off}\n{none}\n{used}"})) == []
    assert _ids(_diagnose(tmp_path, {"a.log": f"{none}\n{local}"})) == []


def test_a_path_is_slow_only_against_what_the_hosts_have(tmp_path: Path) -> None:
    off = "n1:1:1 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1."
    low = "# Avg bus bandwidth    : 0.4"
    apart = (
        "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\nn2:1:1 [0] NCCL INFO Using "
        "network IB"
    )
    together = "n1:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"
    for text in (off, low):
        assert _ids(_diagnose(tmp_path, {"a.log": f"{text}\n{apart}"})) == []
        assert _ids(_diagnose(tmp_path, {"a.log": f"{text}\n{together}"})) == ["slow_transport"]


def test_a_task_that_srun_was_about_to_kill_is_no_want_of_memory(tmp_path: Path) -> None:
    killed, forced = "srun: error: n1: task 0: Killed", "srun: forcing job termination"
    assert _ids(_diagnose(tmp_path, {"a.log": f"{forced}\n{killed}"})) == []
    assert _ids(_diagnose(tmp_path, {"a.log": f"{killed}\nsrun: Terminating StepId=7.0"})) == ["host_oom"]


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
    health = _diagnose(tmp_path, {"a.log": text}).health
    assert (health.world_size, health.hosts, health.channels) == (2, ["n1"], 24)
    assert health.transports == {"P2P/IPC": 24}
    assert health.versions == {"nccl": ["2.27.3+cuda12.9"]}
    assert health.communicators_ready == 1
    assert health.interfaces == ["eno1"]


def test_scheduler_kernel_and_ranks_are_joined(tmp_path: Path) -> None:
    """A rank that the kernel killed: named by srun and dmesg; the other ranks only lost it; the table of sacct
    agrees."""
    files = {
        f"n{r // 4 + 1}.rank{r}.log": (
            f"[rank{r}]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network "
            "error"
        )
        for r in range(8)
        if r != 5
    }
    files["n2.rank5.log"] = "2025-05-05 10:20:00 step 88 loss 1.2"
    files["slurm-4711.out"] = (
        "2025-05-05 10:00:00 starting\nsrun: error: n2: task 5: Killed\nsrun: Terminating StepId=4711.0\n"
        "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2025-05-05T10:20:31 ***\nsrun: error: n1: tasks 0-3: "
        "Terminated"
    )
    files["sacct.txt"] = "JobID|State|ExitCode|End\n4711|OUT_OF_MEMORY|0:125|2025-05-05T10:20:33"
    files["n2.dmesg"] = "May  5 10:20:29 n2 kernel: Memory cgroup out of memory: Killed process 8812 (python3)"
    files["n2.slurmd.log"] = "[2025-05-05T10:20:30.000] [4711.0] error: Detected 1 oom_kill event in StepId=4711.0."
    found = _diagnose(tmp_path, files)
    assert _ids(found) == ["host_oom"]
    assert (found.findings[0].rank, found.findings[0].host) == (5, "n2")
    assert [line.split("  ")[0][-8:] for line in found.story] == sorted(
        line.split("  ")[0][-8:] for line in found.story
    )
    assert "10:20:29  n2: host memory" in found.story[0]
    assert not any("10:00:00" in line for line in found.story)


def test_tasks_of_slurm_are_ranks_only_where_there_are_more_than_nodes(tmp_path: Path) -> None:
    one_a_node = "srun: error: n2: task 1: Segmentation fault\nsrun: error: n1: task 0: Terminated"
    one_a_rank = "srun: error: n2: task 5: Segmentation fault\nsrun: error: n1: tasks 0-3: Terminated"
    assert _diagnose(tmp_path, {"a.out": one_a_node}).findings[0].rank is None
    finding = _diagnose(tmp_path, {"a.out": one_a_rank}).findings[0]
    assert (finding.id, finding.rank, finding.host) == ("rank_died", 5, "n2")


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:24273."
)


def test_what_a_rank_raises_after_it_lost_another_is_no_cause(tmp_path: Path) -> None:
    """Tear-down raises errors of its own; they name themselves as clearly as the cause does."""
    torn = (
        f"{LOST}\n\nDuring handling of the above exception, another exception occurred:\n\nIndexError: list index out "
        "of range"
    )
    files = {"a.rank0.log": torn, "a.rank1.log": torn, "a.rank2.log": "KeyError: 'labels'"}
    finding = _diagnose(tmp_path, files).findings[0]
    assert (finding.id, finding.rank) == ("application_error", 2)
    assert "labels" in finding.cause


@pytest.mark.parametrize("silent", [True, False], ids=["a silent rank", "an address"])
def test_the_host_that_others_lost_is_named(tmp_path: Path, silent: bool) -> None:
    """Its processes say nothing; the others name its address, and whose that is stands in the launcher's lines."""
    lost = LOST.replace("127.0.0.1", "10.7.0.12")
    files = {"n1.rank0.log": lost, "n3.rank2.log": lost}
    if silent:
        files["n2.rank1.log"] = "step 3 loss 0.2"
    else:
        files["slurm.log"] = (
            "allranks 12:34:16 node 1 = n2 eno1 10.7.0.12: ranks 1-1\nsrun: error: n3: task 2: Exited with exit code 1"
        )
    finding = _diagnose(tmp_path, files).findings[0]
    assert (finding.id, finding.rank, finding.host) == ("peer_died_first", 1 if silent else None, "n2")
    files["slurm.log"] = "srun: error: Node failure on n2"
    finding = _diagnose(tmp_path, files).findings[0]
    assert (finding.id, finding.host) == ("node_unhealthy", "n2")


@pytest.mark.parametrize("lost", [True, False], ids=["lost by the others", "unknown"])
def test_a_failed_node_that_no_message_names_is_not_a_survivor(tmp_path: Path, lost: bool) -> None:
    """The batch script's node prints the message, and the ranks that end first are those that lost the node."""
    said = LOST.replace("127.0.0.1", "10.7.0.12") if lost else "step 3 loss 0.2"
    finding = _diagnose(
        tmp_path,
        {
            "n1.rank0.log": said,
            "n3.rank2.log": said,
            "n2.rank1.log": "step 3 loss 0.2",
            "slurm.log": "allranks 12:34:16 node 0 = n1 eth0 10.7.0.11: ranks 0-0\n"
            "allranks 12:34:16 node 1 = n2 eno1 10.7.0.12: ranks 1-1\n"
            "srun: error: n3: task 2: Exited with exit code 1\n"
            "slurmstepd-n1: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-26T05:48:11 DUE TO NODE FAILURE, SEE SLURMCTLD "
            "LOG ***",
        },
    ).findings[0]
    assert (finding.id, finding.host) == ("node_unhealthy", "n2" if lost else None)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "answers"])
def test_the_first_node_that_the_waiting_command_found_lost_is_named(tmp_path: Path, lost: bool) -> None:
    """The driver was on that node, and the other nodes see only a collective that does not end."""
    found = (
        "it does not answer on the network (No route to host)"
        if lost
        else "its slurmd answers, so the node is not lost"
    )
    gave_up = (
        "n1, the job's first node, where its script and rank 0 ran, has recorded nothing for too long: "
        f"Slurm reports the node as mixed ({found}). Job 3 was cancelled."
    )
    case = _diagnose(
        tmp_path, {"driver.json": json.dumps({"gave_up": gave_up}, indent=1), "n2.rank1.log": "step 3 loss 0.2"}
    )
    named = [(f.id, f.host) for f in case.findings]
    assert (("node_unhealthy", "n1") in named) == lost, named


@pytest.mark.parametrize(
    ("said", "race"),
    [("", True), ("the record of this node cannot be written: ", False)],
    ids=["of a program", "of the agent"],
)
def test_an_agent_that_has_lost_the_run_folder_is_no_race_for_data(tmp_path: Path, said: str, race: bool) -> None:
    line = f"{said}[Errno 2] No such file or directory: '/data/cache/.part.113-ac6d.tmp' -> None"
    found = _diagnose(tmp_path, {"n1.rank0.log": line}).findings
    assert ("dataset_race" in [f.id for f in found]) == race, found


def test_a_kill_is_put_down_to_memory_only_as_far_as_the_logs_say_so(tmp_path: Path) -> None:
    killed = "failed (exitcode: -9) local_rank: 2 (pid: 4174) of binary: /usr/bin/python"
    bare = _diagnose(tmp_path, {"a.log": killed}).findings[0]
    assert bare.id == "host_oom"
    assert bare.confidence < 0.7
    assert "somebody may have sent the signal" in bare.against[0]
    shown = _diagnose(
        tmp_path, {"n1.dmesg": "[12.3] Memory cgroup out of memory: Killed process 4174 (python)"}
    ).findings[0]
    assert shown.confidence > 0.9
    assert not shown.against


PARAMS = (
    "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 9 params,\n    while rank 0 has inconsistent"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ((
            "NCCL INFO NET/Plugin: Plugin load returned 2 : cannot open shared object file: No such file or directory "
            ": when loading libnccl-net.so"
        ), []),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/nccl-Ab12Cd'", ["shm_removed"]),
        ("bench/test.py FAILED", []),
        ("gpu burn test on node-3: FAILED", ["node_unhealthy"]),
        ("RuntimeError: Distributed package doesn't have NCCL built in", ["library_missing"]),
        ((
            "ValueError: Free memory on device cuda:1 (3.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization"
        ), ["cuda_oom"]),
        ("rank 2 crashed with exit code 1", []),
        ("rank 2 crashed", ["rank_died"]),
        ("     \u00d7 slurmctld.service - Slurm controller daemon", ["slurm_controller_error"]),
        ("     ● slurmctld.service - Slurm controller daemon", []),
        ("RuntimeError: use_libuv was requested but PyTorch was built", ["library_missing"]),
        ("n1:1:1 [0] ibvwrap.c:174 NCCL WARN Call to ibv_modify_qp failed with error No such device errno 19", ["rdma_unreachable"]),
        ("NCCL WARN Rank 1 could not open mlx5_2 (errno 2). Restrict NCCL_IB_HCA.", ["rdma_unreachable"]),
        ("NCCL INFO NCCL_IB_HCA set by environment to mlx5", []),
        ("mlx5_core 0000:c1:00.0 eth0: TX timeout on queue: 25, SQ: 0x2bb", ["broken_node_network"]),
        ((
            "transport/nvls.cc:379 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : "
            "CUDA error 401"
        ), ["fabric_manager"]),
        ("RuntimeError: unable to allocate shared memory(shm) for file", ["shm_too_small"]),
        ("NCCL INFO NET/OFI Could not disable CUDA API usage\nNCCL INFO Using network AWS Libfabric", []),
        ("NCCL INFO NET/OFI Could not disable CUDA API usage\nNCCL INFO Using network Socket", ["silent_socket_fallback"]),
        ("NVML: Unable to retrieve NVLink information as all links are inActive", []),
        ("NVRM: NVLink 3 of GPU 2 is down", ["gpu_hardware_fault"]),
        ("4711   train   gpu   lab   8 CANCELLED+      0:0", ["slurm_cancelled"]),
        ("4711_3   train   gpu   lab   8 CANCELLED      0:15", ["slurm_cancelled"]),
        ("4711.batch   batch   lab   8 CANCELLED      0:15", []),
        ("  ran for 600011 milliseconds before timing out", ["collective_hang"]),
        ("the probe ran for 60 milliseconds", []),
        ("Last enqueued NCCL work: 2, last completed NCCL work: -1", ["first_collective_failed"]),
        ("Last enqueued NCCL work: -1, last completed NCCL work: -1", []),
        ("Last enqueued NCCL work: 2, last completed NCCL work: 2", []),
        ("fused.so: cannot open shared object file: No such file or directory, falling back to the plain kernel", []),
        (f"{PARAMS} 0 params.", ["first_collective_failed"]),
        (f"{PARAMS} 8 params.", ["model_differs_between_ranks"]),
    ],
)  # fmt: skip
def test_one_line_is_told_from_its_neighbour(tmp_path: Path, text: str, found: list[str]) -> None:
    assert _ids(_diagnose(tmp_path, {"a.log": text}))[:1] == found


def test_missing_rank_is_named(tmp_path: Path) -> None:
    files = {f"n.rank{r}.log": f"comm 0x1 rank {r} nranks 4 cudaDev 0\n" + watchdog(r) for r in (0, 1, 3)}
    files["n.rank2.log"] = "comm 0x1 rank 2 nranks 4 cudaDev 0"
    finding = _diagnose(tmp_path, files).findings[0]
    assert (finding.id, finding.rank) == ("collective_mismatch", 2)
    assert "rank 2 did not" in finding.cause


def test_the_rank_that_a_dump_signal_names_is_the_one_to_look_at(tmp_path: Path) -> None:
    text = "\n".join(IDLE.format(rank=r, group=0, seq=899).replace("rank 0", "rank 7") for r in (2, 3))
    finding = _diagnose(tmp_path, {"a.log": text}).findings[0]
    assert (finding.id, finding.rank) == ("peer_died_first", 7)
