"""The logs of a job are those that Slurm names: scontrol's record, else sacct's, else what sbatch's options imply."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.diagnose.job_logs import find_job_logs
from allranks.analysis.lint.command_options import sbatch_options
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.slurm.answers import SACCT_DELIMITER
from tests.unit.test_slurm_commands import AWAY, NOT_KNOWN, saying, stub

# Recorded with 22.05; the script's arguments and the comment contain keys.
JOB = (
    "JobId={raw} {array}JobName=my job UserId=ann(1000) GroupId=g(1) Priority=1 JobState={state} Reason=None ExitCode={code} "
    "NodeList=gpu[07-09] BatchHost=gpu07 Command={folder}/a.sh x WorkDir=/q StdErr=/z WorkDir={folder} Comment=hello "
    "StdOut=/x y  StdErr={folder}/{err} StdIn=/dev/null StdOut={folder}/{out} Power= \n"
)


def record(folder: Path, raw: int, state: str = "FAILED", code: str = "1:0", array: str = "", **files: str) -> str:
    files = {"out": "o-%5j-%N-%n-%s.log", "err": "o-%5j-%N-%n-%s.log", **files}
    return JOB.format(folder=folder, raw=raw, state=state, code=code, array=array, **files)


def test_patterns_that_scontrol_leaves_are_expanded_and_free_text_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "o-00012-gpu07-0-batch.log").touch()
    (tmp_path / "err 12").touch()
    slurm = stub(tmp_path, scontrol=saying(tmp_path, record(tmp_path, 12, err="err %j")))
    logs = find_job_logs(slurm, "12")
    assert {path.name for path in logs.files} == {"o-00012-gpu07-0-batch.log", "err 12"}
    assert logs.notes == ["job 12: FAILED (exit code 1)"] and "12|FAILED|1:0" in logs.accounting


def test_only_failed_tasks_of_an_array_are_read_and_a_missing_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "a_1").touch()
    tasks = [("COMPLETED", "0:0", "a_%a"), ("FAILED", "0:53", "gone/a_%a"), ("TIMEOUT", "0:15", "a_%4a")]
    text = "".join(
        record(tmp_path, 20 + i, state, code, f"ArrayJobId=22 ArrayTaskId={i} ", out=out, err=out)
        for i, (state, code, out) in enumerate(tasks, start=1)
    )
    (tmp_path / "a_0003").touch()
    logs = find_job_logs(stub(tmp_path, scontrol=saying(tmp_path, text)), "22")
    assert [path.name for path in logs.files] == ["a_0003"]
    assert "2 of 3 tasks failed; only their logs are read" in logs.notes
    assert any("22_2" in note and f"mkdir -p {tmp_path}/gone" in note for note in logs.notes)


@pytest.mark.parametrize(
    ("command", "script", "paths", "log"),
    [
        ("sbatch job.sh", "", ["o-%A_%a", ""], "o-9_3"),  # 24.05 and later
        ("sbatch -N 2 --output=o-%x job.sh -o no", "", None, "o-job"),
        ("sbatch -W job.sh", '#!/bin/bash\n#SBATCH -e "e 1" -o "x %J" # why\n', None, "x 7"),
        ("sbatch job.sh", "NONE", None, "slurm-9_3.out"),
    ],
)
def test_older_jobs_are_found_in_accounting(
    tmp_path: Path, command: str, script: str, paths: list[str] | None, log: str
) -> None:
    (tmp_path / log).touch()
    row = ["9_3", "7", "job", "ann", "n[1-2]", str(tmp_path), command, "FAILED", "1:0", *(paths or [])]
    rows = saying(tmp_path, SACCT_DELIMITER.join(row) + "\n")
    new = rows if paths else "echo 'Invalid field requested: \"StdOut\"' >&2; exit 1"
    sacct = f'case "$*" in *StdOut*) {new} ;; *--batch-script*) {saying(tmp_path, script)} ;; *) {rows} ;; esac'
    slurm = stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"), sacct=sacct)
    assert find_job_logs(slurm, "9_3").files == [tmp_path / log]


def test_what_is_unknown_is_said(tmp_path: Path) -> None:
    gone = stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"), sacct="echo accounting storage is disabled")
    with pytest.raises(RequestError, match=r"does not know it .* allranks diagnose FILE"):
        find_job_logs(gone, "12")
    with pytest.raises(RequestError, match="expected a job ID"):
        find_job_logs(gone, "12; rm")
    with pytest.raises(EnvironmentNotAble, match="Unable to contact"):
        find_job_logs(stub(tmp_path, scontrol=saying(tmp_path, AWAY, 1, ">&2")), "12")
    waits = stub(tmp_path, scontrol=saying(tmp_path, record(tmp_path, 12, "PENDING", "0:0")))
    with pytest.raises(RequestError, match="has not started; it will write to"):
        find_job_logs(waits, "12")


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("job.sh -N 2", "job.sh"), ("-N 2 -t1:00 job.sh", "job.sh"), ("-W --exclusive job.sh", "job.sh"), ("-N1 : -N 2 job.sh a", "job.sh"),
        ("--parsable --gres gpu:2 -- job.sh", "job.sh"), ("-J name", None), ("--wrap hostname", None), ("-vQ -p main job.sh", "job.sh"),
    ],
)  # fmt: skip
def test_the_script_is_told_from_the_options_of_sbatch(line: str, script: str | None) -> None:
    words = line.split()
    _, place = sbatch_options(words)
    assert (words[place] if place < len(words) else None) == script
