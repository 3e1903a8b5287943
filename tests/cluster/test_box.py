# ruff: noqa: S108 - /tmp of the nodes is meant
"""The cluster in a box: what a node is and what Slurm does on it, faults, starting and ending, plans for its nodes."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import Box, HiddenFolder, down, find_box, lifecycle, processes, requirements
from allranks.lab.cluster.box import box_status
from allranks.lab.cluster.faults import FAULTS, heal, inject, injected
from allranks.nodes.slurm.answers import JobInfo, NodeInfo
from allranks.nodes.slurm.commands import Slurm, find_slurm
from allranks.nodes.slurm.endpoints import NAME_VARIABLE, find_endpoint, read_endpoint
from allranks.utils.machine import visible_gpus
from tests.cluster import helpers
from tests.cluster.helpers import CLI, cli, cli_environment, connects, machine, on, submit, wait_for, wait_state
from tests.cluster.runs import allranks
from tests.conftest import tiny_spec
from tests.other_users import run_as


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
        names = {pid: processes.status(pid)["Name"] for pid in pids if processes.environment(pid).get("RANK")}
        return [pid for pid, name in names.items() if name == "sleep"]

    wait_for(lambda: sum(len(sleepers(node)) for node in box.node_names) == 6)
    assert inject(box, "kill-rank", rank="5", signal="STOP").detail["nodes"] == "n3"
    states = [processes.status(pid)["State"][0] for node in box.node_names for pid in sleepers(node)]
    assert sorted(states) == ["S"] * 5 + ["T"]
    done = cli("fault", "kill-rank", "3", "--job", job)
    assert done.returncode == 0, done.stderr
    wait_state(box, job, "FAILED", timeout_s=30)
    assert "n2: task 3: Killed" in (shared / f"out-{job}").read_text()
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


def test_slurmd_and_slurmctld_stop_and_restart(box: Box, shared: Path) -> None:
    job = submit(box, shared, "sleep 300\n", "--nodelist=n2")
    wait_state(box, job, "RUNNING")
    with injected(box, "stop-slurmd", "n2"):
        assert not connects(box, "n1", "n2")
    assert connects(box, "n1", "n2")
    with injected(box, "stop-slurmctld"):
        done = cli("status", "--json")
        assert done.returncode == 1 and '"controller": false' in done.stdout
    assert helpers.job_state(box, job) == "RUNNING"
    inject(box, "restart-slurmd", "n2")
    inject(box, "restart-slurmctld")
    assert helpers.job_state(box, job) == "RUNNING"


def test_a_cut_link_is_silent_and_an_interface_down_is_not(box: Box) -> None:
    code = "import socket\ntry: socket.create_connection(('n1', 6818), 1.5)\nexcept OSError as e: print(repr(e), e)"
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
        assert box.run(["sh", "-c", "head -c 100000 /dev/zero > /tmp/more"], node="n1", cwd="/").returncode != 0
        assert on(box, "n1", "cat", "/tmp/kept") == "kept"
        assert on(box, "n2", "sh", "-c", "echo x > /tmp/x && cat /tmp/x") == "x"
        assert int(on(box, "n1", "df", "--output=used", "/tmp").split()[-1]) < 2048
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
    assert cli("fault", "heal").stderr.splitlines() == ["healed: cut-link n3", "healed: wrong-clock n1"]
    assert "No active faults" in cli("fault", "heal").stderr
    with pytest.raises(RequestError, match="Did you mean cut-link"):
        inject(box, "cut-lnk", "n1")


def test_every_fault_has_a_command(box: Box) -> None:
    from allranks.cli.cluster import fault

    assert set(fault.commands) == {*FAULTS, "heal"}


def test_a_second_box_lives_beside_the_first(box: Box, make_box: Callable[..., Box]) -> None:
    with pytest.raises(RequestError, match="already running"):
        make_box(box.name)
    other = make_box(f"b-{os.getpid()}", nodes=1, conf=("KillWait=7",), shared_tmp=True, cpus={"": 3})
    assert other.plan.network != box.plan.network
    assert other.run(["srun", "hostname", "-I"]).stdout.split() == [other.plan.nodes[0].address]
    shown = other.run(["scontrol", "show", "config"]).stdout
    assert "KillWait                = 7 sec" in shown and "CPUTot=3" in other.run(["scontrol", "show", "node"]).stdout
    visible = sorted(path.name for path in Path("/tmp").iterdir() if path.name[0] != ".")
    assert on(other, "n1", "ls", "/tmp").split() == visible
    assert box.run(["sinfo", "--noheader", "--format=%R %D"]).stdout.splitlines() == ["main 3", "gpu 3"]


def test_hidden_folders_are_empty_where_they_are_hidden(box: Box, make_box: Callable[..., Box], shared: Path) -> None:
    (shared / "data").write_text("x")
    other = make_box(f"h-{os.getpid()}", nodes=2, hidden=(HiddenFolder(str(shared), ("n2",)),))
    seen = other.run(["srun", "--nodes=2", "sh", "-c", f"echo $(hostname) $(ls {shared})"], cwd="/").stdout
    assert sorted(seen.splitlines()) == ["n1 data", "n2"]
    on(other, "n2", "touch", f"{shared}/local")
    assert [path.name for path in shared.iterdir()] == ["data"]


@pytest.mark.parametrize("crash", [False, True])
def test_down_leaves_nothing(crash: bool, make_box: Callable[..., Box], shared: Path) -> None:
    name = f"d-{os.getpid()}"
    before = machine(name)
    other = make_box(name, nodes=2)
    submit(other, shared, "srun sleep 300\n", "--nodes=2")
    lingerer = subprocess.Popen([*other.command_prefix(), "sleep", "600"])
    spaces = helpers.box_spaces(other)
    members = processes.in_namespaces("net", spaces)
    assert len(spaces) == 3 and len(members) > 8
    published = read_endpoint(other.folder.path)
    assert published is not None and published.name == name
    if crash:
        processes.kill(pid for pid in members if pid != lingerer.pid)
        assert processes.wait_gone([pid for pid in members if pid != lingerer.pid], 10) == []
        assert other.folder.client.exists() and find_endpoint(name) is None
    assert down(name) is True
    lingerer.wait(timeout=10)
    assert processes.wait_gone(members, 10) == []
    assert processes.in_namespaces("net", spaces) == []
    assert machine(name) == before
    assert not other.folder.path.exists() and find_endpoint(name) is None
    with pytest.raises(EnvironmentNotAble, match="no longer running"):
        other.command_prefix()
    assert down(name) is False


def test_slurm_clients_find_the_box_while_up(make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    idle, end = lifecycle.wait_idle, lifecycle._end_processes
    name = f"e-{os.getpid()}"

    def wait_idle(started: Box, names: list[str]) -> None:
        order.append(f"before idle: {find_endpoint(name) is not None}")
        idle(started, names)

    def end_processes(identity: str, ended: str) -> None:
        order.append(f"before the kill: {find_endpoint(name) is not None}")
        end(identity, ended)

    monkeypatch.setattr(lifecycle, "wait_idle", wait_idle)
    monkeypatch.setattr(lifecycle, "_end_processes", end_processes)
    other = make_box(name, nodes=1)
    monkeypatch.setenv(NAME_VARIABLE, name)
    slurm = find_slurm(Path("/"))
    assert slurm.prefix == other.command_prefix("/") and name in slurm.label
    assert slurm.call("srun", "hostname").stdout == "n1\n"
    assert other.folder.client.stat().st_mode & 0o077 == 0, "it is executed, so it is its owner's only"
    before = other.folder.client.read_bytes()
    inject(other, "kill-node", "n1")
    heal(other)
    assert other.folder.client.read_bytes() == before and find_slurm(Path("/")).prefix == slurm.prefix
    assert down(name) is True
    assert order == ["before idle: False", "before the kill: False"]


def test_an_up_that_fails_leaves_nothing(make_box: Callable[..., Box]) -> None:
    name = f"f-{os.getpid()}"
    before = machine(name)
    done = cli("up", "--name", name, "--nodes", "1", "--conf", "NoSuchKey=1")
    assert done.returncode == 1 and "NoSuchKey" in done.stderr and "Traceback" not in done.stderr
    assert machine(name) == before


def test_accounting_is_real(make_box: Callable[..., Box]) -> None:
    missing = requirements.missing_programs(accounting=True)
    if missing:
        pytest.skip(f"no accounting: {', '.join(missing)} missing")
    other = make_box(f"a-{os.getpid()}", nodes=1, accounting=True)
    assert "Invalid account" in other.run(["srun", "--account=nope", "true"]).stderr
    assert "Invalid qos" in other.run(["srun", "--qos=nope", "true"]).stderr
    assert other.run(["srun", "false"]).returncode == 1
    ask = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=jobid,account,state,exitcode"]
    wait_for(lambda: other.run(ask).stdout == "1|lab|FAILED|1:0\n", 40, "the job in sacct")


def test_without_root_the_box_works_too(shared: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("all these tests run without root already")
    nobody = 65534
    (shared / "state").mkdir()
    os.chown(shared / "state", nobody, nobody)
    site = str(Path(pytest.__file__).parents[1])
    values = cli_environment(XDG_RUNTIME_DIR=str(shared / "state"), PYTHONPATH=f"{helpers.SRC}:{site}", HOME="/")
    values["PATH"] = "/usr/bin:/bin"
    values.pop("ALLRANKS_BOX", None)

    command = ["/usr/bin/python3", "-m", "allranks.cli.cluster"]

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        return run_as(nobody, [*command, *words], env=values)

    if as_nobody("--help").returncode != 0:
        pytest.skip("no Python that an ordinary user may run has these packages")
    started = as_nobody("up", "--nodes", "2")
    if started.returncode == 3:
        pytest.skip(f"no user namespaces: {started.stderr}")
    try:
        assert started.returncode == 0, started.stderr
        done = as_nobody("exec", "--", "srun", "--nodes=2", "sh", "-c", "echo $(id -u) $(hostname)")
        assert sorted(done.stdout.splitlines()) == [f"{nobody} n1", f"{nobody} n2"], done.stderr
        assert as_nobody("fault", "fill-disk", "n1").returncode == 0
        assert as_nobody("exec", "--node", "n1", "--", "sh", "-c", "echo > /tmp/x").returncode != 0
        assert as_nobody("exec", "--", *command, "exec", "--", "hostname").stdout == "login\n" != socket.gethostname()
    finally:
        assert as_nobody("down").returncode == 0
    assert list((shared / "state").iterdir()) == []


def planned(shared: Path, **slurm: Any) -> tuple[dict[str, Any], str]:
    """The plan of a spec as JSON, and as text."""
    spec = tiny_spec("builtin:instructions", shared, cluster={"launcher": "slurm", "nodes": 2, "slurm": slurm})
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    shown = allranks(shared, "plan", "spec.yaml", "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout), allranks(shared, "plan", "spec.yaml").stdout


def test_a_gpu_partition_without_gpus_asked_for_is_resolved_on_the_node(box: Box, shared: Path) -> None:
    plan, text = planned(shared, partition="gpu")
    assert (plan["device"], plan["backend"], plan["device_source"]) == ("cpu", "gloo", "resolved on the node")
    assert "the partition gpu has 2 GPUs per node, but the spec requests none: set cluster.slurm.gpus_per_node" in text
    assert "the default partition has 2 GPUs per node" in planned(shared)[0]["device_reason"]


def test_gpus_asked_for_are_planned_from_a_machine_without_gpus(box: Box, shared: Path) -> None:
    assert not visible_gpus(), "this test is about a login node without GPUs"
    for slurm in ({"gpus_per_node": 2}, {"gres": "gpu:2"}, {"extra": ["--gpus-per-node=2"]}, {"exclusive": True}):
        plan, _ = planned(shared, partition="gpu", **slurm)
        assert (plan["device"], plan["backend"], plan["world_size"]) == ("cuda", "nccl", 4), slurm


def test_jobs_and_nodes_are_read_from_the_real_commands(box: Box, shared: Path) -> None:
    slurm = Slurm(box.command_prefix("/"), "a box")
    script = "trap '' TERM; sleep 60 & wait; wait"
    job = submit(box, shared, script, "--nodes=2", "--time=10", "--job-name=a JobState=FAILED b", "--no-requeue")
    wait_state(box, job, "RUNNING", timeout_s=30)
    found = slurm.try_job(job)
    assert isinstance(found, JobInfo)
    assert (found.job, found.state, found.time_limit_s) == (job, "RUNNING", 600)
    assert found.nodes and found.start_time and found.end_time
    assert found.end_time - found.start_time == 600
    node = slurm.try_node(box.node_names[0])
    assert isinstance(node, NodeInfo) and node.responding
    slurm.cancel(job)
    wait_state(box, job, "CANCELLED", timeout_s=60)
    assert slurm.end_reason(job).startswith("CANCELLED")
    assert slurm.try_job("999999") is None and slurm.try_node("nowhere") is None
    assert slurm.partition_gpus("gpu") == 2 and slurm.partition_gpus("nowhere") is None
