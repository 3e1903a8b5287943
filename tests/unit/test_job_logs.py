"""The logs of a job are those that Slurm names: scontrol's record, else sacct's, else what sbatch's options imply."""

from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose.job_logs import diagnose_job
from allranks.analysis.lint.command_options import sbatch_options
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.slurm.answers import SACCT_DELIMITER
from allranks.nodes.slurm.commands import Slurm
from tests.unit.test_slurm_commands import AWAY, NOT_KNOWN, saying, stub

# Recorded with 22.05; the script's arguments and the comment contain keys.
JOB = (
    "JobId={raw} {array}JobName=my job UserId=ann(1000) GroupId=g(1) Priority=1 JobState={state} Reason=None "
    "ExitCode={code} NodeList=gpu[07-09] BatchHost=gpu07 Command={folder}/a.sh x WorkDir=/q StdErr=/z WorkDir={folder} "
    "Comment=hello StdOut=/x y  StdErr={folder}/{err} StdIn=/dev/null StdOut={folder}/{out} Power= \n"
)


def record(folder: Path, raw: int, state: str = "FAILED", code: str = "1:0", array: str = "", **files: str) -> str:
    files = {"out": "o-%5j-%N-%n-%s.log", "err": "o-%5j-%N-%n-%s.log", **files}
    return JOB.format(folder=folder, raw=raw, state=state, code=code, array=array, **files)


def read(slurm: Slurm, job: str) -> tuple[set[str], list[str]]:
    """The names of the logs that were read, each of which names itself in an exception, and the notes."""
    diagnosis, notes = diagnose_job(slurm, job)
    return {Path(item.file).name for finding in diagnosis.findings for item in finding.evidence}, notes


def log(path: Path) -> Path:
    path.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: bad\n')
    return path


def test_patterns_that_scontrol_leaves_are_expanded_and_free_text_is_no_path(tmp_path: Path) -> None:
    names = {log(tmp_path / name).name for name in ("o-00012-gpu07-0-batch.log", "err 12")}
    slurm = stub(tmp_path, scontrol=saying(tmp_path, record(tmp_path, 12, err="err %j")))
    assert read(slurm, "12") == (names, ["job 12: FAILED (exit code 1)"])
    timeout = stub(tmp_path, scontrol=saying(tmp_path, record(tmp_path, 12, "TIMEOUT", "0:15", out="no", err="no")))
    assert diagnose_job(timeout, "12")[0].findings[0].id == "slurm_time_limit", "without any log"


def test_only_failed_tasks_of_an_array_are_read_and_a_missing_folder_is_said(tmp_path: Path) -> None:
    for name in ("a_1", "a_0003"):
        log(tmp_path / name)
    tasks = [("COMPLETED", "0:0", "a_%a"), ("FAILED", "0:53", "gone/a_%a"), ("FAILED", "1:0", "a_%4a")]
    text = "".join(
        record(tmp_path, 20 + i, state, code, f"ArrayJobId=22 ArrayTaskId={i} ", out=out, err=out)
        for i, (state, code, out) in enumerate(tasks, start=1)
    )
    names, notes = read(stub(tmp_path, scontrol=saying(tmp_path, text)), "22")
    assert names == {"a_0003"} and "2 of 3 tasks failed; only their logs are read" in notes
    assert any("22_2" in note and note.endswith(f"mkdir -p {tmp_path}/gone") for note in notes)


@pytest.mark.parametrize(
    ("command", "script", "path", "name"),
    [
        ("sbatch job.sh", "", "o-%A_%a", "o-9_3"),  # 24.05 and later
        ("sbatch -N 2 --output=o-%x job.sh -o no", "", None, "o-job"),
        ("sbatch -W job.sh", '#!/bin/bash\n#SBATCH -e "e 1" -o "x %J" # why\n', None, "x 7"),
        ("sbatch -o o-%j --wrap=echo it's\nhostname\n", "", None, "o-7"),
        ("sbatch /tmp/copy/here.sh", "NONE", None, "of file"),
        ("sbatch job.sh", "NONE", None, "slurm-9_3.out"),
    ],
)
def test_old_jobs_are_in_accounting(tmp_path: Path, command: str, script: str, path: str | None, name: str) -> None:
    (tmp_path / "here.sh").write_text("#!/bin/sh\n#SBATCH -o 'of file'\n")
    row = ["9_3", "7", "job", "ann", "n[1-2]", str(tmp_path), command, "FAILED", "1:0", *([path, ""] if path else [])]
    rows = saying(tmp_path, SACCT_DELIMITER.join(row) + "\n")
    new = rows if path else "echo 'Invalid field requested: \"StdOut\"' >&2; exit 1"
    sacct = f'case "$*" in *StdOut*) {new} ;; *--batch-script*) {saying(tmp_path, script)} ;; *) {rows} ;; esac'
    slurm = stub(tmp_path, scontrol=saying(tmp_path, NOT_KNOWN, 1, ">&2"), sacct=sacct)
    log(tmp_path / name)
    assert read(slurm, "9_3")[0] == {name}


@pytest.mark.parametrize(
    ("job", "answer", "error", "said"),
    [
        ("12", (NOT_KNOWN, 1, ">&2"), RequestError, r"does not know it .* allranks diagnose FILE"),
        ("12; rm", (NOT_KNOWN, 1, ">&2"), RequestError, "expected a job ID"),
        ("12", (AWAY, 1, ">&2"), EnvironmentNotAble, "Unable to contact"),
        ("12", (record(Path("/x"), 12, "PENDING", "0:0").replace("gpu[07-09]", ""),), RequestError, "has not started"),
    ],
)
def test_what_is_unknown_is_said(tmp_path: Path, job: str, answer: Any, error: type[Exception], said: str) -> None:
    slurm = stub(tmp_path, scontrol=saying(tmp_path, *answer), sacct="echo accounting storage is disabled")
    with pytest.raises(error, match=said):
        diagnose_job(slurm, job)


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("job.sh -N 2", "job.sh"), ("-N 2 -t1:00 job.sh", "job.sh"), ("-W --exclusive job.sh", "job.sh"),
        ("-N1 : -N 2 job.sh a", "job.sh"), ("--parsable --gres gpu:2 -- job.sh", "job.sh"), ("-J name", None),
        ("--wrap hostname", None), ("-vQ -p main job.sh", "job.sh"),
    ],
)  # fmt: skip
def test_the_script_is_told_from_the_options_of_sbatch(line: str, script: str | None) -> None:
    words = line.split()
    _, place = sbatch_options(words)
    assert (words[place] if place < len(words) else None) == script
