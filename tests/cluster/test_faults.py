# ruff: noqa: S108 - /tmp of the nodes is meant
"""Every fault really does its effect, and healing ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import Box, processes
from allranks.lab.cluster.box import box_status, node_states
from allranks.lab.cluster.faults import FAULTS, heal, inject, injected
from tests.cluster.helpers import cli, connects, job_state, on, submit, wait_for, wait_state

LISTEN = "import socket; s=socket.create_server(('', 7777)); c=s.accept()[0]\nwhile c.recv(1<<20): pass\nc.send(b'end')"
SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 7777), 5)
began = time.time(); s.sendall(bytes(int(sys.argv[2]))); s.shutdown(1); s.recv(9)
print(time.time() - began)
"""


def _ranks_script(shared: Path) -> str:
    (shared / "rank.sh").write_text("export RANK=$SLURM_PROCID\nexec sleep 300\n")
    return f"srun --kill-on-bad-exit=1 sh {shared}/rank.sh\n"


def test_kill_rank_ends_that_rank_and_no_other(box: Box, shared: Path) -> None:
    job = submit(box, shared, _ranks_script(shared), "--nodes=3", "--ntasks-per-node=2")

    def sleepers(node: str) -> list[int]:
        space = processes.namespace(box.init(node), "pid")
        pids = processes.in_namespaces("pid", [space] if space else [])
        return [
            pid for pid in pids if processes.environment(pid).get("RANK") and processes.status(pid)["Name"] == "sleep"
        ]

    wait_for(lambda: sum(len(sleepers(node)) for node in box.node_names) == 6)
    stopped = inject(box, "kill-rank", rank="5", signal="STOP")
    assert stopped.detail["nodes"] == "n3"
    states = [processes.status(pid)["State"][0] for node in box.node_names for pid in sleepers(node)]
    assert sorted(states) == ["S"] * 5 + ["T"]
    done = cli("fault", "kill-rank", "3", "--job", job)
    assert done.returncode == 0, done.stderr
    wait_state(box, job, "FAILED", timeout_s=30)
    output = (shared / f"out-{job}").read_text()
    assert "n2: task 3: Killed" in output
    with pytest.raises(RequestError, match="No process of rank 3"):
        inject(box, "kill-rank", rank="3", job=job)


def test_kill_node_ends_all_of_it_and_healing_starts_it_anew(box: Box, shared: Path) -> None:
    on(box, "n3", "touch", "/tmp/before")
    inject(box, "hide-folder", "n3", path=str(shared))
    old = box.init("n3")
    inject(box, "kill-node", "n3")
    assert not processes.alive(old)
    assert not connects(box, "n1", "n3")
    assert [node.running for node in box_status(box).nodes] == [True, True, False]
    with pytest.raises(EnvironmentNotAble, match="fault heal n3"):
        box.node_prefix("n3")
    assert [record.kind for record in heal(box, "n3")] == ["kill-node"]
    assert connects(box, "n1", "n3")
    assert on(box, "n3", "ls", "-A", "/tmp") == ""
    assert "n3" in box.run(["srun", "--nodelist=n3", "hostname"]).stdout


@pytest.mark.full
def test_slurm_notices_a_dead_node_and_requeues_its_job(box: Box, shared: Path) -> None:
    job = submit(box, shared, "sleep 300\n", "--nodelist=n2", "--requeue")
    wait_state(box, job, "RUNNING")
    with injected(box, "kill-node", "n2"):
        wait_for(lambda: node_states(box)["n2"].startswith("down"), 90, "a down node")
        assert job_state(box, job) == "PENDING"


def test_slurmd_and_slurmctld_stop_and_restart(box: Box, shared: Path) -> None:
    job = submit(box, shared, "sleep 300\n", "--nodelist=n2")
    wait_state(box, job, "RUNNING")
    with injected(box, "stop-slurmd", "n2"):
        assert not connects(box, "n1", "n2")
    assert connects(box, "n1", "n2")
    with injected(box, "stop-slurmctld"):
        done = cli("status", "--json")
        assert done.returncode == 1 and '"controller": false' in done.stdout
    assert job_state(box, job) == "RUNNING"
    inject(box, "restart-slurmd", "n2")
    inject(box, "restart-slurmctld")
    assert job_state(box, job) == "RUNNING"


def test_a_cut_link_is_silent_and_an_interface_down_is_not(box: Box) -> None:
    code = (
        "import socket\ntry: socket.create_connection(('n1', 6818), 1.5)\nexcept OSError as e: print(type(e).__name__, "
        "e)"
    )
    with injected(box, "cut-link", "n2"):
        assert on(box, "n2", "cat", "/sys/class/net/eno1/operstate") == "up"
        assert "timed out" in on(box, "n2", "python3", "-c", code)
        assert connects(box, "n1", "n3")
    wait_for(lambda: connects(box, "n2", "n1"), 10)  # the neighbour's address may have to be resolved again
    with injected(box, "interface-down", "n2"):
        assert on(box, "n2", "cat", "/sys/class/net/eno1/operstate") == "down"
        assert "unreachable" in on(box, "n2", "python3", "-c", code)
    wait_for(lambda: connects(box, "n2", "n1") and connects(box, "n1", "n2"), 10)


def _transfer_s(box: Box, source: str, target: str, amount: int) -> float:
    import subprocess

    listener = subprocess.Popen([*box.node_prefix(target, "/"), "python3", "-c", LISTEN])
    try:
        wait_for(lambda: ":7777" in on(box, target, "ss", "-ltn"), 10)
        return float(on(box, source, "python3", "-c", SEND, target, str(amount)))
    finally:
        listener.terminate()
        listener.wait(timeout=10)


def test_a_slow_link_is_slow_in_both_directions(box: Box) -> None:
    amount = 2_500_000
    with injected(box, "slow-link", "n2", rate="10mbit"):
        assert 1.5 < _transfer_s(box, "n2", "n1", amount) < 6
        assert 1.5 < _transfer_s(box, "n1", "n2", amount) < 6
        assert _transfer_s(box, "n1", "n3", amount) < 1
    assert _transfer_s(box, "n1", "n2", amount) < 1
    with pytest.raises(RequestError, match="--rate 10"):
        inject(box, "slow-link", "n2", rate="10")


def test_a_full_disk_takes_nothing_more_and_costs_no_memory(box: Box, shared: Path) -> None:
    on(box, "n1", "sh", "-c", "echo kept > /tmp/kept")
    with injected(box, "fill-disk", "n1"):
        full = box.run(["sh", "-c", "head -c 100000 /dev/zero > /tmp/more"], node="n1", cwd="/")
        assert full.returncode != 0
        assert on(box, "n1", "cat", "/tmp/kept") == "kept"
        assert on(box, "n2", "sh", "-c", "echo x > /tmp/x && cat /tmp/x") == "x"
        used = int(on(box, "n1", "df", "--output=used", "/tmp").split()[-1])
        assert used < 2048
    on(box, "n1", "sh", "-c", "head -c 5000000 /dev/zero > /tmp/more")
    with injected(box, "fill-disk", "n1", path="/dev/shm", leave_kb="64"):
        on(box, "n1", "sh", "-c", "head -c 50000 /dev/zero > /dev/shm/a")
        assert box.run(["sh", "-c", "head -c 50000 /dev/zero > /dev/shm/b"], node="n1", cwd="/").returncode != 0
    for path in (shared, box.folder.spool):
        with pytest.raises(RequestError, match="shares this disk"):
            inject(box, "fill-disk", "n1", path=str(path))


def test_a_hidden_folder_can_itself_be_full(box: Box, shared: Path) -> None:
    (shared / "data").write_text("x")
    with injected(box, "hide-folder", "n2", path=str(shared)):
        assert on(box, "n2", "ls", str(shared)) == ""
        assert on(box, "n1", "ls", str(shared)) == "data"
        with injected(box, "fill-disk", "n2", path=str(shared)):
            assert box.run(["sh", "-c", f"echo x > {shared}/x"], node="n2", cwd="/").returncode != 0
        with pytest.raises(RequestError, match="already active"):
            inject(box, "hide-folder", "n2", path=str(shared))
    assert on(box, "n2", "ls", str(shared)) == "data"
    with pytest.raises(RequestError, match="needs this folder"):
        inject(box, "hide-folder", "n2", path="/run")


def test_hosts_that_map_the_node_to_loopback(box: Box) -> None:
    own = box.plan.nodes[0].address
    with injected(box, "loopback-hosts", "n1"):
        assert on(box, "n1", "hostname", "--ip-address") == "127.0.1.1"
        assert on(box, "n2", "getent", "hosts", "n1").split()[0] == own
    assert on(box, "n1", "hostname", "--ip-address") == own


def test_a_wrong_clock_is_told_to_the_tasks_of_that_node(box: Box) -> None:
    told = ["srun", "--nodes=3", "sh", "-c", "echo $(hostname) $ALLRANKS_CLOCK_OFFSET_S"]
    with injected(box, "wrong-clock", "n2", seconds="-2.5"):
        assert sorted(box.run(told).stdout.splitlines()) == ["n1", "n2 -2.5", "n3"]
        assert on(box, "n2", "printenv", "ALLRANKS_CLOCK_OFFSET_S") == "-2.5"
        assert box.run(["srun", "--export=NONE", "-wn2", "/usr/bin/env"]).stdout.count("CLOCK_OFFSET_S=-2.5") == 1
    assert sorted(box.run(told).stdout.splitlines()) == ["n1", "n2", "n3"]


def test_the_command_line_notes_and_heals(box: Box) -> None:
    assert cli("fault", "wrong-clock", "n1", "-300").returncode == 0
    assert cli("fault", "cut-link", "n3").returncode == 0
    assert "n3 faults: cut-link" in cli("status").stdout
    again = cli("fault", "cut-link", "n3")
    assert again.returncode == 2 and "already active" in again.stderr
    assert cli("fault", "wrong-clock", "n1", "soon").returncode == 2
    healed = cli("fault", "heal")
    assert healed.stderr.splitlines() == ["healed: cut-link n3", "healed: wrong-clock n1"]
    assert "No active faults" in cli("fault", "heal").stderr
    with pytest.raises(RequestError, match="Did you mean cut-link"):
        inject(box, "cut-lnk", "n1")


def test_every_fault_has_a_command(box: Box) -> None:
    from allranks.cli.cluster import fault

    assert set(fault.commands) == {*FAULTS, "heal"}
