"""Failures 21 to 40 that take nodes: made to happen on a real Slurm, and refused by name, or of no effect."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.lab.cluster import Box, requirements
from allranks.lab.cluster.processes import check_output as at_once
from allranks.lab.cluster.processes import find_program
from tests.cluster.helpers import SRC
from tests.cluster.runs import allranks, log_of, run

OWN = """
import json, os
print("ENV", json.dumps(dict(os.environ)), flush=True)
"""
STUB = """#!/bin/sh
echo "$0 $@" >> {record}
exit 255
"""


def own_spec(shared: Path, **cluster: Any) -> dict[str, Any]:
    """A user's program that tells its environment; it needs no torch, so such a run is short."""
    (shared / "own.py").write_text(OWN)
    base = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "stage": "never"}
    return {
        "name": "own",
        "script": {"path": str(shared / "own.py")},
        "run_root": str(shared / "runs"),
        "cluster": base | cluster,
    }


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


def test_a_node_that_may_not_write_the_run_folder_is_named(box: Box, shared: Path) -> None:
    import yaml

    (shared / "spec.yaml").write_text(yaml.safe_dump(own_spec(shared)))
    (shared / "runs").mkdir()
    with read_only(box, "n2", shared / "runs"):
        done = allranks(shared, "doctor", "spec.yaml", "--no-imports", "--json")
    bad = {f"{n['host']}.{c['name']}": c for n in json.loads(done.stdout)["nodes"] for c in n["checks"] if not c["ok"]}
    assert done.returncode == 1 and list(bad) == ["n2.run"], done.stdout
    assert bad["n2.run"]["found"] == f"READ-ONLY({shared}/runs)"
    assert "n2 cannot write there: Read-only file system" in bad["n2.run"]["cure"]


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
    monkeypatch.setenv("PATH", wanted["PATH"])
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("ONLY_HERE", "1")
    done, run_dir = run(shared, own_spec(shared, env=wanted))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    logs = run_dir.rank_logs(1)
    assert sorted(logs) == [0, 1]
    for path in logs.values():
        line = next(line for line in path.read_text().splitlines() if line.startswith("ENV "))
        found = json.loads(line.removeprefix("ENV "))
        assert {name: found.get(name) for name in wanted} == wanted
        assert "ONLY_HERE" not in found, "the trap was not set"
    assert not record.exists(), record.read_text()


@pytest.mark.full
def test_a_launcher_that_needs_ssh_is_named(box: Box, shared: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'allranks[deepspeed]'")
    (shared / "own.py").write_text(OWN)
    (shared / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={shared}/hosts", str(shared / "own.py")]
    done = box.run(["env", "DS_ACCELERATOR=cpu", *launch], node="n1", cwd=shared, timeout_s=120)
    assert done.returncode != 0
    (shared / "job.out").write_text(done.stdout + done.stderr)
    assert diagnose([shared / "job.out"]).findings[0].id == "ssh_launcher", done.stderr


def test_modules_that_cannot_be_loaded_end_the_job_by_name(
    box: Box, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module system, such as Lmod, that hides `anaconda` until `external` is loaded. The nodes have none of their
    own."""
    module = """() { case "$2:$SEEN" in external:*|anaconda:external) export SEEN="$2" ;; *)
 echo "Lmod has detected the following error: The following module(s) are unknown: \\"$2\\"" >&2; return 1 ;; esac
}"""
    monkeypatch.setenv("BASH_FUNC_module%%", module)
    done, run_dir = run(shared, own_spec(shared, modules=["anaconda", "external"]))
    assert done.returncode == 3, done.stdout + done.stderr + log_of(run_dir)
    assert "`module load anaconda` failed on the job's first node, as the first of the list" in done.stderr
    assert diagnose([run_dir.root]).findings[0].id == "library_missing"
    done, run_dir = run(shared, own_spec(shared, modules=["external", "anaconda"]))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    assert '"SEEN": "anaconda"' in run_dir.rank_logs(1)[1].read_text()


@pytest.mark.full
def test_an_account_that_slurm_does_not_know_is_refused_at_submission(
    shared: Path, make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = requirements.missing_programs(accounting=True)
    if missing:
        pytest.skip(f"no accounting: {', '.join(missing)} missing")
    box = make_box(f"acc-{os.getpid()}", nodes=2, accounting=True)
    monkeypatch.setenv("ALLRANKS_BOX", box.name)
    done, run_dir = run(shared, own_spec(shared, slurm={"account": "nope"}))
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        "Invalid account" in done.stderr
        and "sacctmgr show assoc" in done.stderr
        and "cluster.slurm.account" in done.stderr
    )
    assert not run_dir.rank_logs(1)
    (shared / "sbatch.err").write_text(box.run(["sbatch", "--account=nope", "--wrap=true"], cwd=shared).stderr)
    assert diagnose([shared / "sbatch.err"]).findings[0].id == "slurm_submit_rejected"
