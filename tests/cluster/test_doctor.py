"""The doctor on a real Slurm: each fault is named with its node and its cure, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import heal, injected
from allranks.nodes.slurm.allocations import END_TIMEOUT_S
from tests.cluster.conftest import end_jobs
from tests.cluster.helpers import cli_environment, job_state, on, submit, wait_for, wait_state

SPEC = """
name: d
model: {name: tiny:mistral}
data: {source: rows.json, template: alpaca}
cluster: {launcher: slurm, nodes: 3, procs_per_node: 1, env: {OMP_NUM_THREADS: "1"}}
run_root: runs
"""


@pytest.fixture
def spec(shared: Path) -> Path:
    """A run of three nodes, in a folder that all of them see."""
    (shared / "rows.json").write_text('[{"instruction": "a", "input": "", "output": "b"}]')
    (shared / "spec.yaml").write_text(SPEC)
    return shared / "spec.yaml"


def doctor(spec: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``allranks doctor SPEC WORDS``, without imports unless they are asked for."""
    quick = [] if "--imports" in words else ["--no-imports"]
    return subprocess.run(
        [sys.executable, "-m", "allranks.cli.main", "doctor", str(spec), *quick, *words],
        cwd=spec.parent,
        env=cli_environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )


def as_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The document, if that is all there is on standard output."""
    return json.loads(done.stdout)


def failed(document: dict[str, Any]) -> dict[str, str]:
    """``host.check`` to what was found, of all that failed."""
    return {f"{n['host']}.{c['name']}": c["found"] for n in document["nodes"] for c in n["checks"] if not c["ok"]}


def test_three_nodes_that_are_well(box: Box, spec: Path) -> None:
    began = time.monotonic()
    done = doctor(spec)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < END_TIMEOUT_S, "the nodes were given back by force"
    lines = [line for line in done.stdout.splitlines() if line.startswith("n")]
    assert [line.split()[:3] for line in lines[:3]] == [[n, "proj=ok", "pkgs=ok"] for n in ("n1", "n2", "n3")]
    assert "net=eth0/" in lines[0] and "net=eno1/" in lines[1] and "reach=2/2" in lines[2] and "data=ok" in lines[0]
    assert f"box '{box.name}' is used" in done.stdout
    end_jobs(box)
    assert sorted(p.name for p in spec.parent.iterdir()) == ["rows.json", "spec.yaml"]


def test_faults_of_three_kinds_are_told_apart(box: Box, spec: Path) -> None:
    with (
        injected(box, "loopback-hosts", "n1"),
        injected(box, "hide-folder", "n2", path=str(spec.parent)),
        injected(box, "wrong-clock", "n3", seconds="90"),
    ):
        done = doctor(spec, "--json")
    assert done.returncode == 1
    found = failed(as_json(done))
    assert found.pop("n3.clock").startswith(("WRONG(+90", "WRONG(+89"))
    assert found == {
        "n1.name": "LOOPBACK(127.0.1.1)",
        "n2.run": f"NOT-SHARED({spec.parent})",
        "n2.data": f"MISSING({spec.parent}/rows.json)",
    }
    cures = {f"{n['host']}.{c['name']}": c["cure"] for n in as_json(done)["nodes"] for c in n["checks"]}
    assert "/etc/hosts of n1" in cures["n1.name"] and "run_root" in cures["n2.run"]


def test_a_private_tmp_is_no_run_folder(box: Box, spec: Path, tmp_path: Path) -> None:
    done = doctor(spec, "--set", f"run_root={tmp_path}")
    assert done.returncode == 1
    assert done.stdout.count(f"run=MISSING({tmp_path})") == 3
    done = doctor(spec, "--set", "run_root=/tmp")
    assert done.stdout.count("run=NOT-SHARED(/tmp)") == 3


def test_a_node_without_a_package_is_left_out_if_the_spec_allows(box: Box, spec: Path) -> None:
    found = importlib.util.find_spec("safetensors")
    assert found is not None and found.origin is not None
    with injected(box, "hide-folder", "n2", path=str(Path(found.origin).parent)):
        done = doctor(spec)
        assert done.returncode == 1 and "n2 proj=ok pkgs=MISSING(safetensors)" in done.stdout
        assert "n2: pkgs:" in done.stdout and "pip install" in done.stdout
        done = doctor(spec, "--exclude-bad", "--json")
        assert done.returncode == 0 and as_json(done)["excluded"] == ["n2"]
        assert list(as_json(done)["network"]["seats"]) == ["n1", "n3"]
        assert "cluster.nodes=2" in as_json(done)["notes"][-1]
        done = doctor(spec, "--exclude-bad", "--set", "train.global_batch_size=3")
        assert done.returncode == 1 and "does not allow a run without n2" in done.stdout


def test_an_import_that_fails_on_one_node(box: Box, spec: Path) -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    with injected(box, "hide-folder", "n3", path=str(Path(found.origin).parent / "nn")):
        done = doctor(spec, "--imports", "--json")
    assert done.returncode == 1
    assert set(failed(as_json(done))) == {"n3.imports"}, done.stdout
    assert "torch" in failed(as_json(done))["n3.imports"]


def test_a_node_whose_interface_is_down(box: Box, spec: Path) -> None:
    with injected(box, "interface-down", "n3"):
        done = doctor(spec, "--exclude-bad", "--json")
    heal(box)
    wait_for(lambda: idle(box) == 3, 60, "three idle nodes")
    assert failed(as_json(done)) == {"n3.probe": "NO-ANSWER"}, done.stdout
    assert done.returncode == 0 and as_json(done)["excluded"] == ["n3"]


def idle(box: Box) -> int:
    """Nodes that would take a job now."""
    return box.run(["sinfo", "-hN", "-p", "main", "-o%T"], cwd="/").stdout.split().count("idle")


def test_requests_that_slurm_would_refuse(box: Box, spec: Path) -> None:
    done = doctor(spec, "--set", "cluster.slurm.partition=gpux")
    assert done.returncode == 2 and "cluster.slurm.partition gpux" in done.stderr and "gpu, main" in done.stderr
    done = doctor(spec, "--set", "cluster.nodes=9")
    assert done.returncode == 2 and "cluster.nodes 9: Slurm refuses" in done.stderr


def test_nodes_that_are_not_free_in_time(box: Box, spec: Path) -> None:
    job = submit(box, spec.parent, "sleep 60\n", "--nodes=3", "--exclusive")
    wait_state(box, job, "RUNNING")
    done = doctor(spec, "--wait-s", "1")
    assert done.returncode == 3 and "not free within 1 s" in done.stderr
    assert box.run(["squeue", "--noheader", "--format=%i"], cwd="/").stdout.split() == [job]


@contextmanager
def listening(box: Box, node: str, port: int) -> Iterator[None]:
    """Somebody else's server on a node."""
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


def test_inside_a_job_as_the_launcher_does(box: Box, spec: Path) -> None:
    program = spec.parent / "inside.py"
    program.write_text(INSIDE)
    job = submit(
        box,
        spec.parent,
        f"{sys.executable} {program}\n",
        "--nodes=2",
        f"--export=ALL,PYTHONPATH={cli_environment()['PYTHONPATH']}",
    )
    wait_for(lambda: job_state(box, job) in ("COMPLETED", "FAILED"), 30)
    text = (spec.parent / f"out-{job}").read_text()
    assert "ready n1 n2" in text, text
    lines = (spec.parent / "preflight.txt").read_text().splitlines()
    assert len(lines) == 2 and all(line.endswith(" OK") for line in lines)
    assert [node["host"] for node in json.loads((spec.parent / "preflight.json").read_text())] == ["n1", "n2"]


INSIDE = """
from pathlib import Path
from allranks import api
from allranks.nodes.slurm.allocations import expand_hostlist
from allranks.nodes.slurm.commands import Slurm
from allranks.nodes.preflight.runner import TargetNodes, require_usable_nodes, run_preflight, write_preflight
from allranks.rundir.paths import RunDir
import os

spec = api.load_spec(Path("spec.yaml"), ["cluster.nodes=2"])
hosts = expand_hostlist(Slurm([], 'own'), os.environ["SLURM_JOB_NODELIST"])
where = TargetNodes(hosts=hosts, job_id=os.environ["SLURM_JOB_ID"])
found = run_preflight(where, spec, api.plan(spec), Path.cwd(), imports=False)
write_preflight(RunDir(Path.cwd()), found)
require_usable_nodes(found.reports)
assert found.network and 20000 <= found.port < 32768
print("ready", *found.network.seats)
"""


def test_collectives_name_the_slow_node(box: Box, spec: Path) -> None:
    words = ("--collectives", "--json")
    well = doctor(spec, *words)
    first = as_json(well)
    assert well.returncode == 0 and not first["slow_pairs"], well.stdout + well.stderr
    for one in first["sweep"]:
        assert one["bus_bytes_per_s"] == pytest.approx(4 / 3 * one["bytes"] / one["seconds"])  # three ranks
    with injected(box, "slow-link", "n2", rate="500mbit"), injected(box, "loopback-hosts", "n1"):
        done = doctor(spec, *words)
    document = as_json(done)
    assert len(document["pairs"]) == 3, done.stdout + done.stderr
    assert set(failed(document)) == {"n1.name"}, "the ranks are told their interface, so this does not stop them"
    assert done.returncode == 1 and document["pairs_verdict"].startswith("n2 is slow to all other nodes")
    assert document["slow_pairs"] and all(1 in pair for pair in document["slow_pairs"])
    large = max(document["sweep"], key=lambda one: one["bytes"])
    assert large["bytes"] >= 2**20 and large["bus_bytes_per_s"] < 4 * 500e6 / 8, "a ring is as fast as its slowest link"
