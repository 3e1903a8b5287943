# ruff: noqa: S108 - /tmp of the nodes is meant
"""Starting and ending boxes: options, several at once, crashes, accounting, without root."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import Box, down, lifecycle, processes, requirements
from allranks.lab.cluster.faults import heal, inject
from allranks.nodes.slurm.commands import find_slurm
from allranks.nodes.slurm.endpoints import NAME_VARIABLE, find_endpoint, read_endpoint
from tests.cluster.helpers import SRC, box_spaces, cli, cli_environment, machine, on, submit, wait_for


def test_a_second_box_lives_beside_the_first(box: Box, make_box: Callable[..., Box]) -> None:
    with pytest.raises(RequestError, match="already running"):
        make_box(box.name)
    other = make_box(f"b-{os.getpid()}", nodes=1, conf=("KillWait=7",), shared_tmp=True, cpus={"": 3})
    assert other.plan.network != box.plan.network
    assert other.run(["srun", "hostname", "-I"]).stdout.split() == [other.plan.nodes[0].address]
    shown = other.run(["scontrol", "show", "config"]).stdout
    assert "KillWait                = 7 sec" in shown and "CPUTot=3" in other.run(["scontrol", "show", "node"]).stdout
    assert on(other, "n1", "ls", "/tmp").split() == sorted(
        path.name for path in Path("/tmp").iterdir() if path.name[0] != "."
    )
    assert box.run(["sinfo", "--noheader", "--format=%R %D"]).stdout.splitlines() == ["main 3", "gpu 3"]


def test_hidden_folders_are_empty_where_they_are_hidden(box: Box, make_box: Callable[..., Box], shared: Path) -> None:
    from allranks.lab.cluster import HiddenFolder

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
    spaces = box_spaces(other)
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


def test_slurms_clients_find_the_box_while_it_is_up(
    make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.full
def test_sixteen_nodes(make_box: Callable[..., Box]) -> None:
    began = time.monotonic()
    other = make_box(f"s-{os.getpid()}", nodes=16)
    assert time.monotonic() - began < 30
    hosts = other.run(["srun", "--nodes=16", "hostname"]).stdout.split()
    assert sorted(hosts) == sorted(f"n{number}" for number in range(1, 17))


def test_without_root_the_box_works_too(shared: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("all these tests run without root already")
    nobody = 65534
    (shared / "state").mkdir()
    os.chown(shared / "state", nobody, nobody)
    site = str(Path(pytest.__file__).parents[1])
    values = cli_environment(XDG_RUNTIME_DIR=str(shared / "state"), PYTHONPATH=f"{SRC}:{site}", HOME="/")
    values["PATH"] = "/usr/bin:/bin"
    values.pop("ALLRANKS_BOX", None)

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/python3", "-m", "allranks.cli.cluster", *words],
            **{"user": nobody, "group": nobody, "extra_groups": [], "cwd": "/"},
            env=values,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

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
        again = ["/usr/bin/python3", "-m", "allranks.cli.cluster", "exec", "--", "hostname"]
        assert as_nobody("exec", "--", *again).stdout == "login\n" != socket.gethostname()
    finally:
        assert as_nobody("down").returncode == 0
    assert list((shared / "state").iterdir()) == []
