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

from allranks.errors import RequestError
from allranks.testcluster import Box, down, needs, procs
from tests.cluster.helpers import (
    SRC,
    box_spaces,
    cli,
    cli_environment,
    machine,
    on,
    submit,
    wait_for,
)


def test_a_second_box_lives_beside_the_first(box: Box, make_box: Callable[..., Box]) -> None:
    with pytest.raises(RequestError, match="already up"):
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
    from allranks.testcluster import Hidden

    (shared / "data").write_text("x")
    other = make_box(f"h-{os.getpid()}", nodes=2, hidden=(Hidden(str(shared), ("n2",)),))
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
    members = procs.in_namespaces("net", spaces)
    assert len(spaces) == 3 and len(members) > 8
    if crash:
        procs.kill(pid for pid in members if pid != lingerer.pid)
        assert procs.wait_gone([pid for pid in members if pid != lingerer.pid], 10) == []
    assert down(name) is True
    lingerer.wait(timeout=10)
    assert procs.wait_gone(members, 10) == []
    assert procs.in_namespaces("net", spaces) == []
    assert machine(name) == before
    assert not other.folder.path.exists()
    assert down(name) is False


def test_an_up_that_fails_leaves_nothing(make_box: Callable[..., Box]) -> None:
    name = f"f-{os.getpid()}"
    before = machine(name)
    done = cli("up", "--name", name, "--nodes", "1", "--conf", "NoSuchKey=1")
    assert done.returncode == 1 and "NoSuchKey" in done.stderr and "Traceback" not in done.stderr
    assert machine(name) == before


def test_accounting_is_real(make_box: Callable[..., Box]) -> None:
    missing = needs.missing_programs(accounting=True)
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
