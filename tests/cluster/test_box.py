# ruff: noqa: S108 - /tmp of the nodes is meant
"""The cluster in a box: what a node is, what Slurm does on it, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.lab.cluster import Box, find_box, processes
from allranks.lab.cluster.box import box_status
from tests.cluster.helpers import CLI, cli, cli_environment, job_state, on, submit, wait_for, wait_state

ALL_REDUCE = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank())])
dist.all_reduce(value)
words = ["REDUCED", socket.gethostname(), dist.get_rank(), dist.get_world_size(), value.item()]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one call: print may write a line in pieces
dist.destroy_process_group()
"""


def test_three_nodes_are_idle(box: Box) -> None:
    now = box_status(box)
    assert now.healthy and [node.state for node in now.nodes] == ["idle"] * 3


def test_each_node_has_its_own_network_name_tmp_and_processes(box: Box) -> None:
    here = {kind: processes.namespace("self", kind) for kind in ("net", "mnt", "uts", "ipc", "pid")}
    seen: list[dict[str, str | None]] = [here]
    python = {Path(p).parts[2] for p in box.plan.python_folders}  # a Python in /tmp is shown to the nodes
    for node in box.plan.nodes:
        assert on(box, node.name, "hostname") == node.name
        assert on(box, node.name, "hostname", "-I").split() == [node.address]
        assert on(box, node.name, "ls", "/sys/class/net").split() == sorted(["lo", node.interface])
        assert on(box, node.name, "ls", "-A", "/tmp", "/dev/shm").split() == ["/dev/shm:", "/tmp:", *sorted(python)]
        assert on(box, node.name, "sh", "-c", "ls /sys/fs/cgroup | head -1")
        assert len(on(box, node.name, "ps", "-e").splitlines()) < 10
        seen.append({kind: processes.namespace(box.init(node.name), kind) for kind in here})
    for kind in here:
        assert len({spaces[kind] for spaces in seen}) == 4, f"{kind} is shared"
    on(box, "n1", "touch", "/tmp/only-here")
    assert box.run(["test", "-e", "/tmp/only-here"], node="n2").returncode == 1
    assert not Path("/tmp/only-here").exists()


def test_names_resolve_and_never_wait_for_dns(box: Box) -> None:
    code = "import socket,sys,time; t=time.time(); f=socket.gethostbyname; print(f('n1'), f('n3'), socket.getfqdn())\n"
    code += "try: f('nowhere.example.org')\nexcept OSError: print(time.time() - t)"
    addresses, wait = on(box, "n2", "python3", "-c", code).splitlines()
    prefix = box.plan.network.rpartition(".")[0]
    assert addresses == f"{prefix}.11 {prefix}.13 n2"
    assert float(wait) < 0.5


def test_exec_passes_output_input_and_exit_code_untouched(box: Box) -> None:
    done = cli("exec", "--", "sh", "-c", "cat; printf '\\033[1mx'; echo err >&2; exit 7", text="in\n")
    assert (done.stdout, done.stderr, done.returncode) == ("in\n\033[1mx", "err\n", 7)
    assert cli("exec", "hostname").stdout == "login\n"
    assert cli("exec", "--node", "n2", "--", "sh", "-c", "hostname; exit 5").returncode == 5
    assert cli("exec", "echo", "--node", "-x", "--", "--json").stdout == "--node -x -- --json\n"
    assert cli("exec", "pwd").stdout.strip() == str(Path.cwd())
    wrong = cli("exec", "--node", "n9", "hostname")
    assert wrong.returncode == 2 and "n1, n2, n3" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.parametrize("place", [[], ["--node", "n2"]])
def test_ending_exec_ends_what_it_ran(box: Box, place: list[str]) -> None:
    mark = f"{1000 + len(place)}.25"
    running = subprocess.Popen([*CLI, "exec", *place, "sleep", mark], env=cli_environment())

    def sleepers() -> list[int]:
        return [pid for pid in processes.all_pids() if _arguments(pid) == ["sleep", mark]]

    wait_for(sleepers, 10)
    running.send_signal(signal.SIGTERM)
    running.wait(timeout=10)
    wait_for(lambda: not sleepers(), 10, "the end of sleep")


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def test_torchrun_all_reduces_over_three_nodes_with_two_ranks_each(box: Box, shared: Path) -> None:
    pytest.importorskip("torch")
    (shared / "reduce.py").write_text(ALL_REDUCE)
    launch = (
        f"export MASTER=$(getent hosts $(scontrol show hostnames | head -1) | cut -d' ' -f1)\n"
        f"srun bash -c 'exec {sys.executable} -m torch.distributed.run --nnodes=3 --nproc-per-node=2 "
        f"--node-rank=$SLURM_NODEID --master-addr=$MASTER --master-port=20111 {shared}/reduce.py'\n"
    )
    job = submit(box, shared, launch, "--nodes=3", "--ntasks-per-node=1")
    wait_state(box, job, "COMPLETED", "FAILED", timeout_s=120)
    lines = sorted(line for line in (shared / f"out-{job}").read_text().splitlines() if line.startswith("REDUCED"))
    assert lines == [f"REDUCED n{1 + rank // 2} {rank} 6 15.0" for rank in range(6)]


def test_the_environment_reaches_ranks_with_commas_and_spaces(box: Box, shared: Path) -> None:
    os.environ["BOX_TEST_VALUE"] = "^lo,docker0 and 'more'"
    try:
        job = submit(box, shared, "srun --ntasks=2 printenv BOX_TEST_VALUE SLURM_CONF\n", "--nodes=2")
    finally:
        del os.environ["BOX_TEST_VALUE"]
    wait_state(box, job, "COMPLETED")
    expected = ["^lo,docker0 and 'more'", str(box.folder.slurm_conf)]
    assert sorted((shared / f"out-{job}").read_text().splitlines()) == sorted(expected * 2)


def test_slurm_commands_work_without_any_environment(box: Box) -> None:
    done = box.run(["srun", "--export=NONE", "/usr/bin/env", "-i", "/usr/bin/squeue", "--noheader", "--format=%T"])
    assert done.stdout.strip() == "RUNNING", done.stderr


def test_gpus_are_announced_and_handed_out(box: Box) -> None:
    done = box.run(["srun", "--nodes=2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
    assert done.stdout.split() == ["0,1", "0,1"], done.stderr
    assert box.run(["srun", "--gres=gpu:1", "-p", "gpu", "printenv", "SLURM_GPUS_ON_NODE"]).stdout == "1\n"
    assert "not available" in box.run(["srun", "--gres=gpu:3", "true"]).stderr


def test_slurm_refuses_what_it_should_and_test_only_submits_nothing(box: Box) -> None:
    good = box.run(["sbatch", "--test-only", "--nodes=3", "--wrap=hostname"])
    assert good.returncode == 0 and "to start at" in good.stderr
    for wrong, words in ((["--test-only", "-N4"], "not available"), (["-p", "nope"], "Invalid partition")):
        done = box.run(["sbatch", *wrong, "--wrap=hostname"])
        assert done.returncode == 1 and words in done.stderr
    assert box.run(["squeue", "--noheader"]).stdout == ""


def test_sbcast_and_salloc(box: Box, shared: Path) -> None:
    if box.plan.rootless:
        pytest.skip("sbcast needs root: slurmd drops its groups for it")
    (shared / "file").write_text("once\n")
    done = box.run(["salloc", "--nodes=3", "sh", "-c", f"sbcast {shared}/file /tmp/copy && srun cat /tmp/copy"])
    assert done.stdout.split() == ["once"] * 3, done.stderr


def test_scancel_and_signals_reach_the_batch_script(box: Box, shared: Path) -> None:
    script = "trap 'echo stopped; exit 0' USR1\necho ready\nwhile :; do sleep 0.1; done\n"
    job = submit(box, shared, script)
    wait_for(lambda: "ready" in _read(shared / f"out-{job}"))
    box.run(["scancel", "--batch", "--signal=USR1", job])
    wait_state(box, job, "COMPLETED")
    assert "stopped" in _read(shared / f"out-{job}")
    other = submit(box, shared, "sleep 100\n")
    wait_state(box, other, "RUNNING")
    box.run(["scancel", other])
    wait_state(box, other, "CANCELLED", timeout_s=20)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_requeued_job_runs_again_within_seconds(box: Box, shared: Path) -> None:
    script = 'echo run ${SLURM_RESTART_COUNT:-0}\n[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID\n'
    job = submit(box, shared, script + "sleep 0.5\n", "--requeue", "--open-mode=append")
    wait_for(lambda: "run 1" in _read(shared / f"out-{job}"), 30, "the second run")
    wait_state(box, job, "COMPLETED")
    assert _read(shared / f"out-{job}").startswith("run 0\n")


@pytest.mark.full
def test_the_signal_before_the_time_limit(box: Box, shared: Path) -> None:
    script = "trap 'echo warned; exit 0' USR1\nwhile :; do sleep 0.1; done\n"
    job = submit(box, shared, script, "--time=1", "--signal=B:USR1@60")
    wait_state(box, job, "COMPLETED", "TIMEOUT", timeout_s=90)
    said = [line for line in _read(shared / f"out-{job}").splitlines() if not line.startswith("slurmstepd")]
    assert (job_state(box, job), said) == ("COMPLETED", ["warned"])


def test_find_box_and_its_prefix_from_inside_too(box: Box) -> None:
    found = find_box()
    assert found is not None and found.identity == box.identity
    inside = cli("exec", "--", *CLI, "exec", "--", "hostname")
    assert inside.stdout == "login\n", inside.stderr
    assert find_box("no-such-box") is None
    on_node = cli("exec", "--", "srun", *CLI, "down", "--name", box.name)
    assert on_node.returncode == 2 and "from outside" in on_node.stderr
    assert box.is_alive()


def test_status_is_one_json_document(box: Box) -> None:
    done = cli("status", "--json")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["up"], shown["healthy"], len(shown["nodes"])) == (0, True, True, 3)
    assert [node["interface"] for node in shown["nodes"]] == ["eth0", "eno1", "eth0"]
