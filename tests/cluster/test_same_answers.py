"""`doctor` and `run` say the same of each planted fault: the same refusal in the same words, or the same failed checks
on the same nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from allranks.rundir.files import read_json
from tests.cluster.runs import allranks, run, spec_in
from tests.cluster.test_failures_b import read_only

PROGRAM = "import os\n{imports}\nprint('RAN', os.environ['RANK'], flush=True)\n"
QUICK = ("--no-imports",)


def own_spec(shared: Path, imports: str = "", **cluster: Any) -> dict[str, Any]:
    """A program that needs no torch, so that such a run is short."""
    (shared / "prog").mkdir(exist_ok=True)
    (shared / "prog" / "own.py").write_text(PROGRAM.format(imports=imports))
    base = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "device": "cpu", "stage": "never"}
    script, root = {"path": str(shared / "prog" / "own.py")}, str(shared / "runs")
    return {"name": "own", "script": script, "run_root": root, "cluster": base | cluster}


@contextmanager
def short_partition(box: Box) -> Iterator[None]:
    """A partition whose jobs end after ten minutes; sbatch accepts longer ones all the same, and they wait forever."""
    made = box.run(["scontrol", "create", "PartitionName=brief", "Nodes=ALL", "MaxTime=10", "State=UP"], cwd="/")
    assert made.returncode == 0, made.stderr
    try:
        yield
    finally:
        box.run(["scontrol", "delete", "PartitionName=brief"], cwd="/")


def words(text: str) -> str:
    """What a verb says of its failure."""
    return next(line for line in reversed(text.splitlines()) if line.startswith("allranks: "))


REFUSED = {
    "time": ({"partition": "brief", "time": "01:00:00"}, "cluster.slurm.time 01:00:00: Slurm refuses such a job: the partition"),
    "time-syntax": ({"time": "abc"}, "cluster.slurm.time abc: Slurm refuses such a job: Invalid --time specification"),
    "gres": ({"gres": "gpu:9"}, "cluster.slurm.gres gpu:9: Slurm refuses such a job: allocation failure: Requested node"),
    "gres-name": ({"gres": "foo:1"}, "cluster.slurm.gres foo:1: Slurm refuses such a job: Invalid generic resource"),
    "mem": ({"mem": "9000G", "gres": "gpu:1"}, "cluster.slurm.mem 9000G: Slurm refuses"),
    "cpus": ({"cpus_per_task": 900}, "cluster.slurm.cpus_per_task 900: Slurm refuses"),
    "partition": ({"partition": "nope"}, "cluster.slurm.partition nope: Slurm refuses"),
    "constraint": ({"constraint": "nope"}, "cluster.slurm.constraint nope: Slurm refuses"),
    "reservation": ({"reservation": "nope"}, "cluster.slurm.reservation nope: Slurm refuses"),
    "exclude": ({"exclude": ["zz9"]}, "cluster.slurm.exclude zz9: Slurm refuses"),
    "signal": ({"signal_s": 70000}, "cluster.slurm.signal_s 70000: Slurm refuses"),
    "extra-line": ({"extra": ["#SBATCH --exclusive"], "mem": "9000G"}, "cluster.slurm.mem 9000G: Slurm refuses"),
    "option": ({"extra": ["--nosuch=1"]}, "cluster.slurm.extra --nosuch=1: Slurm refuses"),
}  # fmt: skip
"""Each fault of the request, and how both verbs begin."""


def both_refuse(shared: Path, spec: dict[str, Any], code: int, begin: str) -> None:
    """Both verbs end with the same code and the same words, and no job was submitted."""
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    examined, started = (allranks(shared, verb, "spec.yaml") for verb in ("doctor", "run"))
    assert examined.returncode == started.returncode == code, examined.stderr + started.stderr
    assert words(examined.stderr) == words(started.stderr)
    assert words(started.stderr).startswith(f"allranks: {begin}"), started.stderr
    assert not list((shared / "runs").glob("*/job.json"))


@pytest.mark.parametrize("fault", REFUSED)
def test_both_name_the_key_that_slurm_refuses(box: Box, shared: Path, fault: str) -> None:
    options, begin = REFUSED[fault]
    with short_partition(box) if fault == "time" else nullcontext():
        both_refuse(shared, own_spec(shared, slurm=options), 2, begin)


def test_both_refuse_a_program_or_environment_that_is_nowhere_before_a_job_is_submitted(box: Box, shared: Path) -> None:
    spec = own_spec(shared)
    for path in ("gone.py", str(shared / "prog" / "gone.py")):
        both_refuse(shared, {**spec, "script": {"path": path}}, 2, f"script.path {path}: there is no such file")
    both_refuse(shared, own_spec(shared, slurm={"chdir": f"{shared}/no"}), 2, f"cluster.slurm.chdir {shared}/no: there")
    both_refuse(shared, own_spec(shared, python=f"{shared}/noenv"), 2, f"cluster.python {shared}/noenv: there is no")


def test_both_refuse_a_run_root_that_the_login_side_may_not_write(box: Box, shared: Path, monkeypatch: Any) -> None:
    """The mount is read-only in the namespace of the verbs alone."""
    (shared / "ro").mkdir()
    mount = f'mount --bind {shared}/ro {shared}/ro && mount -o remount,bind,ro {shared}/ro && exec "$@"'
    monkeypatch.setattr(
        "tests.cluster.runs.ALLRANKS",
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-m", "allranks.cli.main"],
    )
    spec = {**own_spec(shared), "run_root": str(shared / "ro")}
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    examined, started = (allranks(shared, verb, "spec.yaml") for verb in ("doctor", "run"))
    assert examined.returncode == started.returncode == 3, examined.stderr + started.stderr
    assert words(examined.stderr) == words(started.stderr)
    assert f"run_root {shared}/ro: cannot create a run folder there: Read-only file system" in started.stderr


Plant = Callable[[Box, Path], AbstractContextManager[object]]


def hidden(folder: Callable[[Path], Path]) -> Plant:
    return lambda box, shared: injected(box, "hide-folder", "n2", path=str(folder(shared)))


def package(name: str) -> Path:
    return Path(str(sys.modules[name].__file__)).parent


def hub_spec(shared: Path, **cluster: Any) -> dict[str, Any]:
    spec = spec_in(shared, cluster={"nodes": 2, "stage": "never", "device": "cpu", **cluster})
    return {**spec, "model": {"name": "org/nowhere"}, "adapter": {}}


ON_NODES: dict[str, tuple[Callable[[Path], dict[str, Any]], Plant, dict[str, str], str]] = {
    "program": (
        lambda shared: own_spec(shared, "import pluggy, nosuch_package.part"), hidden(lambda _: package("pluggy")),
        {"n1.program": "MISSING(nosuch_package)", "n2.program": "MISSING(pluggy,nosuch_package)"}, "own.py line 2",
    ),
    "program-harmless": (
        lambda shared: own_spec(shared, "try:\n    import apex\nexcept ImportError:\n    apex = None\ndef later():\n    import nosuch"),
        lambda box, shared: nullcontext(), {}, "",
    ),
    "hub": (
        lambda shared: hub_spec(shared, env={"HF_HUB_OFFLINE": "0"}), lambda box, shared: nullcontext(),
        {"n1.hub": "NOT-CACHED(org/nowhere)", "n2.hub": "NOT-CACHED(org/nowhere)"}, "it does not reach huggingface.co:443",
    ),
    "hub-forbidden": (
        lambda shared: hub_spec(shared, env={"HF_HUB_OFFLINE": "1"}), lambda box, shared: nullcontext(),
        {"n1.hub": "NOT-CACHED(org/nowhere)", "n2.hub": "NOT-CACHED(org/nowhere)"}, "HF_HUB_OFFLINE disables access to the hub",
    ),
    "script": (
        own_spec, hidden(lambda shared: shared / "prog"),
        {"n2.proj": "MISSING({shared}/prog/own.py)"}, "n2 does not see {shared}/prog/own.py",
    ),
    "staged": (
        lambda shared: own_spec(shared, stage="auto", cache=str(shared / "cache")), hidden(lambda shared: shared / "prog"),
        {"n2.proj": "MISSING({shared}/prog/own.py)"}, "a run would copy to n2",
    ),
    "run": (
        own_spec, lambda box, shared: read_only(box, "n2", shared / "runs"),
        {"n2.run": "READ-ONLY({shared}/runs)"}, "n2 cannot write there: Read-only file system",
    ),
}  # fmt: skip
"""Each fault of the nodes: the spec, what is planted, the checks that fail, and words of the fix."""


@pytest.mark.parametrize("fault", ON_NODES)
def test_both_find_the_same_on_the_nodes(box: Box, shared: Path, fault: str) -> None:
    make, plant, wanted, cure = ON_NODES[fault]
    spec = make(shared)
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    (shared / "runs").mkdir()
    with plant(box, shared):
        examined = allranks(shared, "doctor", "spec.yaml", "--json", *QUICK)
        document = json.loads(examined.stdout)
        done, run_dir = run(shared, spec)
    expected = {key: found.format(shared=shared) for key, found in wanted.items()}
    nodes = read_json(run_dir.preflight)
    for answer in (document["nodes"], nodes):
        failed = {f"{n['host']}.{c['name']}": c["found"] for n in answer for c in n["checks"] if not c["ok"]}
        failed = {
            key: found.replace(f"/{run_dir.name})", ")") for key, found in failed.items()
        }  # run examines its own folder
        assert failed == expected, (failed, done.stderr)
    assert examined.returncode == (1 if wanted else 0)
    assert document["starts"] == (done.returncode == 0), done.stdout + done.stderr
    said = json.dumps(document) if document["starts"] else done.stderr
    assert cure.format(shared=shared) in said
