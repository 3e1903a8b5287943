"""The doctor on a real Slurm, and by hand: each fault is named with its node and its cure, and nothing is left."""

import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import heal, injected
from allranks.nodes.slurm.allocations import END_TIMEOUT_S
from tests.cluster.helpers import on, queue, submit, wait_for, wait_state
from tests.cluster.runs import ByHand, doctor, failed_checks, write
from tests.cluster.test_programs import package_of
from tests.conftest import write_rows


def spec_of(shared: Path, launcher: str, **cluster: Any) -> dict[str, Any]:
    """A run of three nodes, whose rows are in a folder that can be hidden."""
    (shared / "data").mkdir()
    write_rows(shared / "data" / "rows.json", 40)
    base: dict[str, Any] = {"launcher": launcher, "nodes": 3, "procs_per_node": 1, "env": {"OMP_NUM_THREADS": "1"}}
    if launcher == "hosts":
        base["device"] = "cpu"
    data = {"source": str(shared / "data" / "rows.json"), "template": "alpaca"}
    root, model = str(shared / "runs"), {"name": "tiny:mistral"}
    return {"name": "d", "model": model, "data": data, "cluster": base | cluster, "run_root": root}


@pytest.fixture
def spec(shared: Path) -> Path:
    write(shared, {**spec_of(shared, "slurm"), "run_root": "runs"})
    return shared


def failed(done: subprocess.CompletedProcess[str], of: str = "found") -> dict[str, str]:
    return failed_checks(json.loads(done.stdout)["nodes"], of)


def test_three_nodes_that_are_well(box: Box, spec: Path) -> None:
    began = time.monotonic()
    done = doctor(spec)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < END_TIMEOUT_S, "the nodes were given back by force"
    lines = [line for line in done.stdout.splitlines() if line.startswith("n")]
    assert [line.split()[:3] for line in lines[:3]] == [[n, "proj=ok", "pkgs=ok"] for n in ("n1", "n2", "n3")]
    assert "net=eth0/" in lines[0] and "net=eno1/" in lines[1] and "reach=2/2" in lines[2] and "data=ok" in lines[0]
    assert f"box '{box.name}' is used" in done.stdout
    wait_for(lambda: not queue(box))
    assert sorted(p.name for p in spec.iterdir()) == ["data", "spec.yaml"]


def test_faults_of_three_kinds_are_told_apart(box: Box, spec: Path) -> None:
    with (
        injected(box, "loopback-hosts", "n1"),
        injected(box, "hide-folder", "n2", path=str(spec)),
        injected(box, "wrong-clock", "n3", seconds="90"),
    ):
        done = doctor(spec, "--json")
    assert done.returncode == 1
    found, cures = failed(done), failed(done, "cure")
    assert found.pop("n3.clock").startswith(("WRONG(+90", "WRONG(+89"))
    assert found.pop("n1.name") == "LOOPBACK(127.0.1.1)"
    assert found == {"n2.run": f"NOT-SHARED({spec})", "n2.data": f"MISSING({spec}/data/rows.json)"}
    assert "/etc/hosts of n1" in cures["n1.name"] and "run_root" in cures["n2.run"]


def test_a_private_tmp_is_no_run_folder(box: Box, spec: Path, tmp_path: Path) -> None:
    done = doctor(spec, "--set", f"run_root={tmp_path}")
    assert done.returncode == 1
    assert done.stdout.count(f"run=MISSING({tmp_path})") == 3
    done = doctor(spec, "--set", "run_root=/tmp")
    assert done.stdout.count("run=NOT-SHARED(/tmp)") == 3


def test_a_node_without_a_package_is_left_out_if_the_spec_allows(box: Box, spec: Path) -> None:
    with injected(box, "hide-folder", "n2", path=package_of("safetensors")):
        done = doctor(spec)
        assert done.returncode == 1 and "n2 proj=ok pkgs=MISSING(safetensors)" in done.stdout
        assert "n2: pkgs:" in done.stdout and "pip install" in done.stdout
        done = doctor(spec, "--exclude-bad", "--json")
        document = json.loads(done.stdout)
        assert done.returncode == 0 and document["excluded"] == ["n2"]
        assert list(document["network"]["seats"]) == ["n1", "n3"]
        assert "cluster.nodes=2" in document["notes"][-1]
        done = doctor(spec, "--exclude-bad", "--set", "train.global_batch_size=3")
        assert done.returncode == 1 and "does not allow a run without n2" in done.stdout


def test_a_version_that_differs_on_one_node_is_refused_by_name(box: Box, spec: Path) -> None:
    """n3 has another safetensors: its record says so, as after a `pip install` on that node alone."""
    version = importlib.metadata.version("safetensors")
    record = f"{importlib.metadata.distribution('safetensors').locate_file('.')}/safetensors-{version}.dist-info"
    with injected(box, "hide-folder", "n3", path=str(Path(record))):
        other = "Metadata-Version: 2.1\\nName: safetensors\\nVersion: 0.0.1\\n"
        on(box, "n3", "sh", "-c", f"printf '{other}' > '{record}/METADATA'")
        done = doctor(spec)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "n3 proj=ok pkgs=VERSION(safetensors 0.0.1" in done.stdout, done.stdout
    assert "n3: pkgs:" in done.stdout and f"safetensors=={version}" in done.stdout
    assert "n1 proj=ok pkgs=ok" in done.stdout and "n2 proj=ok pkgs=ok" in done.stdout


def test_an_import_that_fails_on_one_node(box: Box, spec: Path) -> None:
    with injected(box, "hide-folder", "n3", path=f"{package_of('torch')}/nn"):
        done = doctor(spec, "--imports", "--json")
    assert done.returncode == 1
    assert set(failed(done)) == {"n3.imports"}, done.stdout
    assert "torch" in failed(done)["n3.imports"]


def test_a_node_whose_interface_is_down(box: Box, spec: Path) -> None:
    with injected(box, "interface-down", "n3"):
        done = doctor(spec, "--exclude-bad", "--json")
    heal(box)
    states = ["sinfo", "-hN", "-p", "main", "-o%T"]
    wait_for(lambda: box.run(states, cwd="/").stdout.split().count("idle") == 3, 60, "three idle nodes")
    assert failed(done) == {"n3.probe": "NO-ANSWER"}, done.stdout
    assert done.returncode == 0 and json.loads(done.stdout)["excluded"] == ["n3"]


def test_requests_that_slurm_would_refuse(box: Box, spec: Path) -> None:
    done = doctor(spec, "--set", "cluster.slurm.partition=gpux")
    assert done.returncode == 2 and "cluster.slurm.partition gpux" in done.stderr and "gpu, main" in done.stderr
    done = doctor(spec, "--set", "cluster.nodes=9")
    assert done.returncode == 2 and "cluster.nodes 9: Slurm refuses" in done.stderr


def test_nodes_that_are_not_free_in_time(box: Box, spec: Path) -> None:
    job = submit(box, spec, "sleep 60\n", "--nodes=3", "--exclusive")
    wait_state(box, job, "RUNNING")
    done = doctor(spec, "--wait-s", "1")
    assert done.returncode == 3 and "not free within 1 s" in done.stderr
    assert queue(box).split() == [job]


@contextmanager
def listening(box: Box, node: str, port: int) -> Iterator[None]:
    code = f"import socket, time\ns = socket.create_server(('', {port}))\ntime.sleep(60)"
    server = subprocess.Popen([*box.node_prefix(node, "/"), "python3", "-c", code])
    try:
        wait_for(lambda: f":{port}" in on(box, node, "ss", "-ltn"), 10)
        yield
    finally:
        server.terminate()
        server.wait(timeout=10)


def test_a_port_that_is_taken_on_the_first_node(box: Box, spec: Path) -> None:
    fixed = ["--set", "cluster.rendezvous.port=29777"]
    with listening(box, "n2", 29777):
        assert doctor(spec, *fixed).returncode == 0, "only the first node listens there"
    with listening(box, "n1", 29777):
        done = doctor(spec, *fixed)
    assert done.returncode == 1 and "port=TAKEN(29777)" in done.stdout


def test_collectives_name_the_slow_node(box: Box, spec: Path) -> None:
    words = ("--collectives", "--json")
    well = doctor(spec, *words)
    first = json.loads(well.stdout)
    assert well.returncode == 0 and not first["slow_pairs"], well.stdout + well.stderr
    for one in first["sweep"]:
        assert one["bus_bytes_per_s"] == pytest.approx(4 / 3 * one["bytes"] / one["seconds"])  # three ranks
    with injected(box, "slow-link", "n2", rate="500mbit"), injected(box, "loopback-hosts", "n1"):
        done = doctor(spec, *words)
    document = json.loads(done.stdout)
    assert len(document["pairs"]) == 3, done.stdout + done.stderr
    assert set(failed(done)) == {"n1.name"}, "the ranks are told their interface, so this does not stop them"
    assert done.returncode == 1 and document["pairs_verdict"].startswith("n2 is slow to all other nodes")
    assert document["slow_pairs"] and all(1 in pair for pair in document["slow_pairs"])
    large = max(document["sweep"], key=lambda one: one["bytes"])
    assert large["bytes"] >= 2**20 and large["bus_bytes_per_s"] < 4 * 500e6 / 8, "a ring is as fast as its slowest link"


QUICK = ("--no-imports", "--wait-s")


@contextmanager
def two_faults(box: Box, shared: Path) -> Iterator[None]:
    """n2 lacks the rows, and n1 has a wrong clock."""
    with ExitStack() as faults:
        faults.enter_context(injected(box, "hide-folder", "n2", path=str(shared / "data")))
        faults.enter_context(injected(box, "wrong-clock", "n1", seconds="90"))
        yield


def test_every_host_with_an_agent_is_examined_and_the_one_without_is_named(box: Box, shared: Path) -> None:
    """With `launcher: hosts`, on which the printed command was really started."""
    spec = spec_of(shared, "hosts", hosts=["n1", "n2", "n3"])
    with two_faults(box, shared):
        by_hand = ByHand(box, shared, spec, "doctor", *QUICK, "10", "--json")
        by_hand.start(0)
        by_hand.start(1)
        code, out = by_hand.result()
    document = json.loads(out)
    assert code == 1 and not document["ok"] and not document["starts"]
    found, cures = failed_checks(document["nodes"]), failed_checks(document["nodes"], "cure")
    assert found.pop("n1.clock").startswith(("WRONG(+90", "WRONG(+89"))
    assert found == {"n2.data": f"MISSING({shared}/data/rows.json)", "n3.probe": "NO-ANSWER"}, found
    assert "start its command there" in cures["n3.probe"] and "--node 2 --name n3" in cures["n3.probe"]
    assert "2 of 3 nodes have joined; waiting for n3" in by_hand.said.read_text()
    lines = {n["host"]: {c["name"]: c["found"] for c in n["checks"]} for n in document["nodes"]}
    assert lines["n1"]["net"].startswith("eth0/") and lines["n2"]["net"].startswith("eno1/")
    assert lines["n1"]["reach"] == lines["n2"]["reach"] == "1/1" and lines["n2"]["run"].startswith("rw,")
    assert not list(shared.glob(".allranks-doctor-*")), "nothing is left behind"


def test_run_refuses_the_hosts_that_doctor_names(box: Box, shared: Path) -> None:
    spec = spec_of(shared, "hosts", hosts=["n1", "n2", "n3"])
    with two_faults(box, shared):
        by_hand = ByHand(box, shared, spec)
        for number in range(3):
            by_hand.start(number)
        code, out = by_hand.result(agent_code=1)
    said = " ".join(out.split())
    assert code == 3 and "n1: clock: " in said and "n2: data: " in said and "n3: " not in said, out
    assert not list(shared.glob("runs/*/logs/*/rank*.log"))


def test_hosts_that_are_well_and_two_names_of_one_machine(box: Box, shared: Path) -> None:
    address = box.plan.nodes[1].address
    by_hand = ByHand(box, shared, spec_of(shared, "hosts", hosts=["n1", "n2", address]), "doctor", *QUICK, "60")
    for number, node in enumerate(("n1", "n2", "n2")):
        by_hand.start(number, node)
    code, out = by_hand.result()
    assert code == 0, out + by_hand.said.read_text()
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" OK")] == ["n1", "n2"]
    assert f"{address} is the same machine as n2, and was examined once" in out
    assert "network 10." in out


def test_a_host_that_does_not_share_the_run_root_says_so(box: Box, shared: Path) -> None:
    spec = spec_of(shared, "hosts", hosts=["n1", "n2"], nodes=2)
    with injected(box, "hide-folder", "n2", path=str(shared)):
        by_hand = ByHand(box, shared, spec, "doctor", *QUICK, "10", "--json")
        on_n2 = box.run(["bash", "-c", by_hand.command(1)], node="n2", cwd="/")
        assert on_n2.returncode == 1 and "run_root is not a folder that all hosts share" in on_n2.stderr, on_n2.stderr
        code, out = by_hand.result()
    found = failed_checks(json.loads(out)["nodes"])
    assert code == 1 and found == {f"{host}.probe": "NO-ANSWER" for host in ("n1", "n2")}
