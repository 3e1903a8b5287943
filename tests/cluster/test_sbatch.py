"""``allranks sbatch`` in the box: what users of sbatch see is sbatch's own, and the job is checked and diagnosed."""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from tests.cluster.helpers import cli_environment, job_state, records_of, wait_for, wait_state
from tests.dist.harness import ALLRANKS

GOOD = '#!/bin/bash -e\n#SBATCH -N2 --ntasks-per-node=1\n\necho "$0 [$*] line $LINENO"\nsrun --label echo step\n'


def sbatch(folder: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ALLRANKS, "sbatch", *words], cwd=folder, input=text, capture_output=True, text=True, timeout=150,
        env=cli_environment(),
    )  # fmt: skip


def ended(box: Box, job: str) -> dict[str, str]:
    wait_state(box, job, "COMPLETED", "FAILED")
    return records_of(box, job)


def test_a_job_is_followed_and_its_output_is_that_of_the_script(box: Box, shared: Path) -> None:
    (shared / "good.sh").write_text(GOOD)
    done = sbatch(shared, "--follow", "-o", "log-%j", "good.sh", "a b", "--debug")
    first, *output = done.stdout.splitlines()
    found = re.fullmatch(r"Submitted batch job (\d+)", first)
    assert done.returncode == 0 and found, done.stderr
    record = records_of(box, found[1])
    assert record["JobName"] == "good.sh" and not Path(record["Command"]).exists()
    preflight, script, *steps = output
    assert re.fullmatch(r"allranks: preflight: 2 nodes checked in [\d.]+ s", preflight)
    assert re.fullmatch(r"\S+/slurm_script \[a b --debug] line 4", script) and sorted(steps) == ["0: step", "1: step"]
    assert f"job {found[1]}: COMPLETED" in done.stderr


def test_parsable_wrap_standard_input_and_dependencies_are_sbatchs(box: Box, shared: Path) -> None:
    first = sbatch(shared, "--parsable", "--wrap", "echo it\\'s $0", "-J", "own", text="")
    assert re.fullmatch(r"\d+\n", first.stdout) and first.stderr == ""
    second = sbatch(shared, "-d", f"afterany:{first.stdout.strip()}", "--parsable", "-N1", text=GOOD)
    one, two = (ended(box, done.stdout.strip()) for done in (first, second))
    assert (one["JobName"], two["JobName"]) == ("own", "sbatch")
    assert "it's /" in Path(one["StdOut"]).read_text() and "0: step" in Path(two["StdOut"]).read_text()


@pytest.mark.parametrize("words", ["--nosuch a.sh", "-p none a.sh", "gone.sh", "--wrap", "--wrap x a.sh", "-V", "-"])
def test_wrong_requests_get_sbatchs_message_and_exit_code(box: Box, shared: Path, words: str) -> None:
    (shared / "a.sh").write_text(GOOD)
    own = sbatch(shared, *words.split(), text="hello")
    command = [*box.command_prefix(shared), "sbatch", *words.split()]
    plain = subprocess.run(command, cwd=shared, input="hello", capture_output=True, text=True)
    assert (own.returncode, own.stdout, own.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_error_of_lint_prevents_the_submission_unless_forced(box: Box, shared: Path) -> None:
    (shared / "bad.sh").write_text(GOOD.replace("srun", "srun torchrun --nproc_per_node=2"))
    refused, forced = sbatch(shared, "bad.sh"), sbatch(shared, "--force", "--hold", "bad.sh")
    assert refused.returncode == 1 and refused.stdout == "" and "[node-count]" in refused.stderr
    assert forced.returncode == 0 and forced.stdout.startswith("Submitted batch job")


def test_a_node_that_fails_ends_the_job_before_its_first_command(box: Box, shared: Path) -> None:
    (shared / "good.sh").write_text(GOOD)
    job = sbatch(shared, "--hold", "--parsable", "-w", "n[1-2]", "good.sh").stdout.strip()
    with injected(box, "cut-link", "n2"):  # only now: Slurm starts no job on a node that it knows to be silent
        box.run(["scontrol", "release", job], cwd="/")
        record = ended(box, job)
    log = Path(record["StdOut"]).read_text()
    assert record["ExitCode"] == "3:0" and "slurm_script" not in log
    assert "the job ends before its first command because of n2" in log
    command = [*ALLRANKS, "diagnose", "--job", job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=cli_environment())
    assert "node_unhealthy" in done.stdout and "host n2" in done.stdout


def test_ctrl_c_leaves_the_job_alone_and_an_array_is_not_followed(box: Box, shared: Path) -> None:
    process = subprocess.Popen(
        [*ALLRANKS, "sbatch", "--follow", "--wrap", "sleep 60"], cwd=shared, env=cli_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    job = (process.stdout.readline() if process.stdout else "").split()[-1]
    wait_for(lambda: job_state(box, job) == "RUNNING", what="the start of the job")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert f"job {job} goes on" in said and process.returncode == 0 and job_state(box, job) == "RUNNING"
    array = sbatch(shared, "--follow", "--array=1-2", "--wrap", "true")
    assert array.returncode == 0 and "is not followed: it is an array" in array.stderr
