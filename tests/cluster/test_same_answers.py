"""`doctor` and `run` say the same of each planted fault; failures 21 to 40 that take nodes are refused by name."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.lab.cluster import Box, requirements
from allranks.lab.cluster.faults import injected
from allranks.lab.cluster.processes import check_output as at_once
from allranks.lab.cluster.processes import find_program
from allranks.rundir.files import read_json
from allranks.utils.machine import host_name
from tests.cluster import runs
from tests.cluster.helpers import SRC

PROGRAM = "import os\n{imports}\nprint('RAN', os.environ['RANK'], flush=True)\n"


def own_spec(shared: Path, imports: str = "", **cluster: Any) -> dict[str, Any]:
    """A program that needs no torch, so that such a run is short."""
    return runs.program_in(shared, PROGRAM.format(imports=imports), **{"device": "cpu", "stage": "never", **cluster})


@contextmanager
def read_only(box: Box, node: str, folder: Path) -> Iterator[None]:
    """The node may read a shared folder and not write it, as under a wrong mount option or export."""
    mount = [*box.setup_prefix(node), find_program("mount")]
    at_once([*mount, "--bind", str(folder), str(folder)])
    at_once([*mount, "-o", "remount,bind,ro", str(folder)])
    try:
        yield
    finally:
        at_once([*box.setup_prefix(node), find_program("umount"), str(folder)])


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
    "time": (
        {"partition": "brief", "time": "01:00:00"},
        "cluster.slurm.time 01:00:00: Slurm refuses such a job: the partition"),
    "time-syntax": ({"time": "abc"}, "cluster.slurm.time abc: Slurm refuses such a job: Invalid --time specification"),
    "gres": (
        {"gres": "gpu:9"},
        "cluster.slurm.gres gpu:9: Slurm refuses such a job: allocation failure: Requested node"),
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
    """Both verbs end with the same code and the same words, and no run is left."""
    runs.write(shared, spec)
    examined, started = (runs.allranks(shared, verb, "spec.yaml") for verb in ("doctor", "run"))
    assert examined.returncode == started.returncode == code, examined.stderr + started.stderr
    assert words(examined.stderr) == words(started.stderr)
    assert words(started.stderr).startswith(f"allranks: {begin}"), started.stderr
    assert not list((shared / "runs").glob("*/spec.yaml"))


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
    monkeypatch.setattr("tests.cluster.runs.PREFIX", ["unshare", "-m", "sh", "-c", mount, "sh"])
    ro = shared / "ro"
    refusal = f"{host_name()} is not ready: run: READ-ONLY({ro}); run_root {ro}: cannot create a run folder"
    both_refuse(shared, {**own_spec(shared), "run_root": str(shared / "ro")}, 3, refusal)


Plant = Callable[[Box, Path], AbstractContextManager[object]]


def hidden(folder: Callable[[Path], Path]) -> Plant:
    return lambda box, shared: injected(box, "hide-folder", "n2", path=str(folder(shared)))


def package(name: str) -> Path:
    return Path(str(sys.modules[name].__file__)).parent


def hub_spec(shared: Path, **cluster: Any) -> dict[str, Any]:
    spec = runs.spec_in(shared, cluster={"nodes": 2, "stage": "never", "device": "cpu", **cluster})
    return {**spec, "model": {"name": "org/nowhere"}, "adapter": {}}


ON_NODES: dict[str, tuple[Callable[[Path], dict[str, Any]], Plant, dict[str, str], str]] = {
    "program": (
        lambda shared: own_spec(shared, "import pluggy, nosuch_package.part"), hidden(lambda _: package("pluggy")),
        {"n1.program": "MISSING(nosuch_package)", "n2.program": "MISSING(pluggy,nosuch_package)"}, "own.py line 2",
    ),
    "program-harmless": (
        lambda shared: own_spec(
            shared, "try:\n    import apex\nexcept ImportError:\n    apex = None\ndef later():\n    import nosuch"
        ),
        lambda box, shared: nullcontext(), {}, "",
    ),
    "hub": (
        lambda shared: hub_spec(shared, env={"HF_HUB_OFFLINE": "0"}), lambda box, shared: nullcontext(),
        {"n1.hub": "NOT-CACHED(org/nowhere)", "n2.hub": "NOT-CACHED(org/nowhere)"},
        "it does not reach huggingface.co:443",
    ),
    "hub-forbidden": (
        lambda shared: hub_spec(shared, env={"HF_HUB_OFFLINE": "1"}), lambda box, shared: nullcontext(),
        {"n1.hub": "NOT-CACHED(org/nowhere)", "n2.hub": "NOT-CACHED(org/nowhere)"},
        "HF_HUB_OFFLINE disables access to the hub",
    ),
    "script": (
        own_spec, hidden(lambda shared: shared / "prog"),
        {"n2.proj": "MISSING({shared}/prog/own.py)"}, "n2 does not see {shared}/prog/own.py",
    ),
    "staged": (
        lambda shared: own_spec(shared, stage="auto", cache=str(shared / "cache")),
        hidden(lambda shared: shared / "prog"),
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
    runs.write(shared, spec)
    (shared / "runs").mkdir()
    with plant(box, shared):
        examined = runs.doctor(shared, "--json")
        document = json.loads(examined.stdout)
        done, run_dir = runs.run(shared, spec)
    expected = {key: found.format(shared=shared) for key, found in wanted.items()}
    nodes = read_json(run_dir.preflight)
    for answer in (document["nodes"], nodes):
        # run examines its own folder
        failed = {key: found.replace(f"/{run_dir.name})", ")") for key, found in runs.failed_checks(answer).items()}
        assert failed == expected, (failed, done.stderr)
    assert examined.returncode == (1 if wanted else 0)
    assert document["starts"] == (done.returncode == 0), done.stdout + done.stderr
    assert cure.format(shared=shared) in (json.dumps(document) if document["starts"] else done.stderr)


OWN = """
import json, os
print("ENV", json.dumps(dict(os.environ)), flush=True)
"""
STUB = """#!/bin/sh
echo "$0 $@" >> {record}
exit 255
"""


def test_no_ssh_is_called_and_the_environment_arrives_whatever_sbatch_hands_on(
    box: Box, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way into another node is a trap, and SBATCH_EXPORT=NONE keeps the caller's environment from the job."""
    record, stubs = shared / "called", shared / "bin"
    stubs.mkdir()
    for name in ("ssh", "pdsh", "rsh", "mpirun", "mpiexec"):
        (stubs / name).write_text(STUB.format(record=record))
        (stubs / name).chmod(0o755)
    wanted = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHONPATH": str(SRC),
        "EXCLUDED": "^lo,docker0",
        "QUOTED": 'it\'s "two" words, $HOME and a=b',
        "SITE_TOKEN": "a secret, which stands in no script",
    }
    for name, value in {"PATH": wanted["PATH"], "SBATCH_EXPORT": "NONE", "ONLY_HERE": "1"}.items():
        monkeypatch.setenv(name, value)
    _, run_dir = runs.succeeded(shared, runs.program_in(shared, OWN, env=wanted, stage="never"))
    assert sorted(run_dir.rank_logs(1)) == [0, 1]
    for text in runs.rank_texts(run_dir):
        line = next(line for line in text.splitlines() if line.startswith("ENV "))
        found = json.loads(line.removeprefix("ENV "))
        assert {name: found.get(name) for name in wanted} == wanted
        assert "ONLY_HERE" not in found, "the trap was not set"
    assert not record.exists(), record.read_text()


def test_a_launcher_that_needs_ssh_is_named(box: Box, shared: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'allranks[deepspeed]'")
    program = runs.program_in(shared, OWN)["script"]["path"]
    (shared / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={shared}/hosts", program]
    done = box.run(["env", "DS_ACCELERATOR=cpu", *launch], node="n1", cwd=shared, timeout_s=120)
    assert done.returncode != 0
    (shared / "job.out").write_text(done.stdout + done.stderr)
    assert diagnose([shared / "job.out"]).findings[0].id == "ssh_launcher", done.stderr


def test_modules_that_cannot_be_loaded_end_the_job_by_name(
    box: Box, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module system, such as Lmod, that hides `anaconda` until `external` is loaded. The nodes have none."""
    module = """() { case "$2:$SEEN" in external:*|anaconda:external) export SEEN="$2" ;; *)
 echo "Lmod has detected the following error: The following module(s) are unknown: \\"$2\\"" >&2; return 1 ;; esac
}"""
    monkeypatch.setenv("BASH_FUNC_module%%", module)
    done, run_dir = runs.run(shared, runs.program_in(shared, OWN, stage="never", modules=["anaconda", "external"]))
    assert done.returncode == 3, done.stdout + done.stderr + runs.log_of(run_dir)
    assert "`module load anaconda` failed on the job's first node, as the first of the list" in done.stderr
    assert diagnose([run_dir.root]).findings[0].id == "library_missing"
    _, run_dir = runs.succeeded(shared, runs.program_in(shared, OWN, modules=["external", "anaconda"], stage="never"))
    assert '"SEEN": "anaconda"' in run_dir.rank_logs(1)[1].read_text()


def test_an_account_that_slurm_does_not_know_is_refused_at_submission(
    shared: Path, use_box: Callable[..., Box]
) -> None:
    missing = requirements.missing_programs(accounting=True)
    if missing:
        pytest.skip(f"no accounting: {', '.join(missing)} missing")
    box = use_box("acc", nodes=2, accounting=True)
    runs.write(shared, runs.program_in(shared, OWN, stage="never", slurm={"account": "nope"}))
    done = runs.allranks(shared, "run", "spec.yaml")
    assert done.returncode == 2, done.stdout + done.stderr
    assert all(words in done.stderr for words in ("Invalid account", "sacctmgr show assoc", "cluster.slurm.account"))
    assert not list((shared / "runs").glob("own-*")), "a run that was refused leaves no folder"
    (shared / "sbatch.err").write_text(box.run(["sbatch", "--account=nope", "--wrap=true"], cwd=shared).stderr)
    assert diagnose([shared / "sbatch.err"]).findings[0].id == "slurm_submit_rejected"
