"""Users' own programs under Slurm: public ones, staged, in a container, without a bad node, and how one is stopped."""

import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.functions import launch
from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.helpers import on
from tests.cluster.runs import Submitted, allranks, hosts_of, log_of, program_in, rank_texts, run, spec_in, succeeded
from tests.dist.public_programs import lay_out, plant
from tests.dist.test_functions import Rebuildable, fail, value_of


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("name", ["nanogpt", "ddp", "alpaca"])
def test_it_runs_unchanged_on_several_nodes(box: Box, shared: Path, name: str, nodes: int) -> None:
    spec = {**lay_out(name, shared / "programs"), "run_root": str(shared / "runs")}
    spec["cluster"] = {"launcher": "slurm", "nodes": nodes, "procs_per_node": 1}
    if name == "nanogpt":  # it requires a multiple of the ranks
        spec["script"]["args"].append(f"--gradient_accumulation_steps={nodes}")
    _, run_dir = succeeded(shared, spec)
    metrics = read_json(run_dir.metrics)
    assert (metrics["status"], metrics["world_size"], metrics["nodes"]) == ("succeeded", nodes, nodes)
    assert metrics["steps"] == {"nanogpt": 40, "alpaca": 20}.get(name)
    assert len(hosts_of(run_dir, 1)) == nodes
    assert json.loads(allranks(shared, "diagnose", "--json", str(run_dir.root)).stdout)["findings"] == []


def test_a_killed_rank_of_a_program_is_named_with_its_host(box: Box, shared: Path) -> None:
    spec = {**lay_out("nanogpt", shared / "programs"), "run_root": str(shared / "runs")}
    spec["cluster"] = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1}
    plant(shared / "programs", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    done, run_dir = run(shared, spec)
    assert done.returncode == 1
    assert "rank 1 on n2 failed: ended by SIGKILL, but not by the kernel's out-of-memory killer" in done.stderr
    (first, *_) = json.loads(allranks(shared, "diagnose", "--json", str(run_dir.root)).stdout)["findings"]
    assert (first["id"], first["rank"], first["host"]) == ("rank_died", 1, "n2")


@pytest.mark.full
def test_a_function_returns_its_values_through_slurm_and_raises_what_the_first_rank_did(shared: Path, box: Box) -> None:
    slurm: dict[str, Any] = {"nodes": 2, "procs_per_node": 1, "launcher": "slurm", "run_root": shared, "output": "none"}
    result = launch(value_of, (10,), {"add": 1}, **slurm)
    assert [one["value"] for one in result] == [1, 11] and len(hosts_of(RunDir(result.folder), 1)) == 2
    with pytest.raises(Rebuildable, match=r"^of rank 1\n") as caught:
        launch(fail, ["own type"], **slurm)
    assert caught.value.__notes__[0].startswith("rank 1 on n2")


IN_TMP = """
import os, sys
print('one of', os.environ['WORLD_SIZE'], __file__, sys.argv[1:], flush=True)
"""


@pytest.fixture
def script() -> Iterator[Path]:
    """In /tmp of the login side, of which each node has its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="allranks-own-", dir="/tmp") as file:
        file.write(IN_TMP)
        file.flush()
        yield Path(file.name)


def test_it_is_refused_where_nothing_may_be_staged(box: Box, shared: Path, script: Path) -> None:
    done, run_dir = run(shared, program_in(shared, "", {"path": str(script)}, stage="never"))
    assert done.returncode == 3, done.stdout + done.stderr + log_of(run_dir)
    assert f"n1 does not see {script}" in done.stderr, done.stderr
    assert "put it on a file system shared by all nodes" in done.stderr
    assert "cluster.stage: auto" in done.stderr
    assert not run_dir.rank_logs(1)


def test_it_is_staged_alone_and_run(box: Box, shared: Path, script: Path) -> None:
    """n2 has an older file of the same name: only the content tells."""
    on(box, "n2", "sh", "-c", f"echo 'raise SystemExit(7)' > {script}")
    own = {"path": str(script), "args": ["x", "a b"]}
    _, run_dir = succeeded(shared, program_in(shared, "", own, cache=str(shared / "cache"), stage="auto"))
    for said in rank_texts(run_dir):
        assert "one of 2 /tmp/allranks-" in said and f"/project/{script.name} ['x', 'a b']" in said, said
    nodes = read_json(run_dir.stage)["nodes"]
    assert [[part["name"] for part in node["parts"] if part["staged"]] for node in nodes] == [["project"]] * 2
    (part,) = json.loads(run_dir.bundle.read_bytes())["parts"]
    assert part["files"] == 1
    packed = {path.name.split("-")[0] for path in (shared / "cache" / "allranks").glob("stage-*/*-*")}
    assert packed == {"project"}, "more was packed than a node lacked"
    for node in ("n1", "n2"):
        assert on(box, node, "sh", "-c", "ls -d /tmp/allranks-[0-9]* 2>/dev/null; true") == ""
    on(box, "n2", "rm", str(script))


# Like a container, it has neither srun nor scontrol, and a Python of its own name.
APPTAINER = """#!/bin/bash
echo "$(hostname) $*" >> {calls}
while [[ $1 != *.sif ]]; do shift; done
[ "$2" = python ] || exit 9
shift 2
unset ${{!SLURM_JOB_*}}
PATH=/nowhere exec {python} "$@"
"""


@pytest.mark.parametrize("what", ["program", "training"])
def test_ranks_run_in_the_container_and_the_driver_outside(box: Box, shared: Path, what: str) -> None:
    """A stand-in takes the part of Apptainer, so this proves the calls, not Apptainer itself."""
    (shared / "bin").mkdir()
    apptainer, calls = shared / "bin" / "apptainer", shared / "calls"
    apptainer.write_text(APPTAINER.format(calls=calls, python=shlex.quote(sys.executable)))
    apptainer.chmod(0o755)
    (shared / "image.sif").touch()
    cluster = {"nodes": 2, "python": str(shared / "image.sif"), "setup": [f"export PATH={shared}/bin:$PATH"]}
    program = program_in(shared, "import os\nprint('RAN', os.environ['PATH'], flush=True)\n", **cluster)
    training = spec_in(shared, cluster=cluster, train={"max_steps": 2})
    _, run_dir = succeeded(shared, training if what == "training" else program)
    if what == "training":
        assert read_json(run_dir.metrics)["sync_proof"]["world_size"] == 2
    else:
        logs = rank_texts(run_dir)
        assert len(logs) == 2 and all("RAN " in log and "/nowhere" in log for log in logs), logs
    lines = sorted(calls.read_text().splitlines())
    assert [line.split()[0] for line in lines] == ["n1", "n2"]
    assert all(f"--bind={run_dir.root}" in line and "allranks.launch.agent" in line for line in lines)


def package_of(name: str) -> str:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent)


@pytest.mark.parametrize("what", ["program", "training"])
def test_a_bad_node_is_left_out_and_the_others_train(box: Box, shared: Path, what: str) -> None:
    program = program_in(shared, "import safetensors\nprint('RAN', flush=True)\n", nodes=3, stage="never")
    spec, check = (spec_in(shared, cluster={"stage": "never"}), "pkgs") if what == "training" else (program, "program")
    with injected(box, "hide-folder", "n2", path=package_of("safetensors")):
        done, _ = run(shared, spec)
        assert done.returncode == 3 and f"n2: {check}:" in done.stderr, done.stderr
        _, left = succeeded(shared, spec, "--exclude-bad")
        spec["cluster"] |= {"nodes": 2, "spares": 1}
        shown, full = succeeded(shared, spec)
    assert hosts_of(full, 1) == {"n1", "n3"} and read_json(full.metrics)["world_size"] == 2
    assert "continuing without n2: 2 ranks on 2 nodes" in " ".join(shown.split()), shown
    metrics = read_json(left.metrics)
    assert isinstance(metrics, dict)
    assert metrics["world_size"] == 2 and metrics["nodes"] == 2
    if what == "training":
        assert metrics["sync_proof"]["world_size"] == 2
    else:
        assert ["RAN" in text for text in rank_texts(left)] == [True, True]
    assert "continuing without n2: 2 ranks on 2 nodes" in log_of(left)
    assert sorted(p.name.split(".")[0] for p in left.logs_of(1).glob("*.rank*.log")) == ["n1", "n3"]
    assert "n2" in left.preflight_text.read_text() and "MISSING(safetensors)" in left.preflight_text.read_text()


SAVES = """
import os, signal, sys, time
def stop(number, frame):
    time.sleep(1.0)
    print("SAVED", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("READY", os.getcwd(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stop", ["cancel", "time limit", "scancel"])
def test_a_program_saves_on_sigterm_and_the_run_says_so(box: Box, shared: Path, stop: str) -> None:
    """A module in a working directory of its own, on two nodes."""
    folder = shared / "project" / "tools"
    folder.mkdir(parents=True)
    (folder / "fit.py").write_text(SAVES)
    spec = program_in(shared, "", slurm={"time": "2", "signal_s": 45} if stop == "time limit" else {})
    spec["script"] = {"module": "tools.fit", "workdir": str(shared / "project"), "grace_s": 20}
    job = Submitted(shared, spec)
    job.until_ready(f"READY {shared / 'project'}")
    if stop == "cancel":
        done = allranks(shared, "cancel", job.run.name)
        assert done.returncode == 0 and "asked to stop" in done.stdout, done.stdout + done.stderr
    elif stop == "scancel":
        box.run(["scancel", job.job()], cwd="/")
    said = " ".join(job.ends(1, 120).split())
    assert all("SAVED" in text for text in rank_texts(job.run)), rank_texts(job.run)
    why = "the time limit is near" if stop == "time limit" else f"job {job.job()} was cancelled"
    assert f"stopped ({why}): the ranks received SIGTERM; rank 0, 1 ended with exit code 0" in said, said
    assert "checkpoint" not in said
    assert read_json(job.run.metrics)["status"] == "stopped"
    assert job.run.attempts() == [1]
