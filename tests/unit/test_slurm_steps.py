"""One srun command line, one record of a job, one expansion of host lists: for checks, staging and agents."""

from __future__ import annotations

from pathlib import Path

import pytest

import allranks
from allranks.errors import EnvironmentNotAble
from allranks.nodes.slurm.allocations import Allocation, expand_hostlist
from allranks.nodes.slurm.commands import Slurm
from allranks.nodes.slurm.srun import run_with_srun, srun_command
from allranks.nodes.staging.broadcast import StagingStep


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for programs that stand for Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_step_has_one_task_on_each_node_and_survives_the_failure_of_one() -> None:
    tasks = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0"]
    assert srun_command(2, ["true"], cpus="8", options=["--wait=0"]) == ["srun", *tasks, "--wait=0", "true"]
    named = srun_command(["n1", "n2"], ["true"], prefix=["box"], job_id="7", cpus=8)
    assert named == ["box", "srun", "--jobid=7", "--nodelist=n[1-2]", *tasks, "true"]


def test_checks_and_staging_name_job_and_nodes_alike(programs: Path) -> None:
    program(programs, "srun", f'echo "$@" >> {programs}/calls; cat > /dev/null')
    run_with_srun(["n1", "n2"], ["true"], 5, job_id="7")
    with StagingStep(Allocation(job_id="7", nodes=("n1", "n2")), ["n1", "n2"], ["python3"], {"verb": "ask"}):
        pass
    check, stage = (line.split() for line in (programs / "calls").read_text().splitlines() if line.startswith("--"))
    own = {"--wait=5", "--quit-on-interrupt", "--input=none", "true"}
    assert set(check) - own == set(check) & set(stage), "only what differs by purpose differs"
    assert {"--jobid=7", "--nodelist=n[1-2]", "--ntasks-per-node=1"} <= set(check) & set(stage)
    assert {"--mem=0", "--cpu-bind=none", "--input=all", "--chdir=/", "--overlap"} <= set(stage)


def test_the_job_of_this_process(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentNotAble, match="not inside a Slurm job"):
        Allocation.current()
    program(programs, "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    job = Allocation.current()
    assert (job.nodes, job.folder) == (("n1", "n2"), "cluster.7.3")


def test_a_host_list_that_slurm_does_not_expand_is_an_error_and_not_an_empty_job(programs: Path) -> None:
    program(programs, "scontrol", 'echo "Invalid hostlist: n[1-" >&2; exit 1')
    with pytest.raises(EnvironmentNotAble, match=r"show hostnames failed: Invalid hostlist: n\[1-"):
        expand_hostlist(Slurm([], "own"), "n[1-")


@pytest.mark.parametrize(
    ("words", "place"), [('"srun"', "nodes/slurm/srun.py"), ('"hostnames"', "nodes/slurm/allocations.py")]
)
def test_no_other_module_builds_these_commands(words: str, place: str) -> None:
    package = Path(allranks.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if words in path.read_text("utf-8")}
    readers = {name for name in found if name.startswith(("analysis/", "lab/cluster/requirements.py"))}
    assert found - readers == {place}
