"""A disk that fills up, for real (a small tmpfs): one paragraph that names file and cure, exit code 3."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.checkpoints import newest_checkpoint
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec
from tests.dist.harness import ALLRANKS, allranks, fill_disk, folders, train, until, write_spec
from tests.unit.report_runs import complete_run
from tests.unit.trace_builder import op, step, write_ranks

MATRIX = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-3\t0\nGPU1\tNV4\t X \t0-3\t0\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MiB of which nobody else writes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "runs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def is_told(done: subprocess.CompletedProcess[str], *parts: str, code: int = 3) -> None:
    said = done.stdout + done.stderr
    assert "defect" not in said and "Traceback" not in said, said
    last = done.stderr.strip().splitlines()[-1]
    assert [part for part in parts if part not in last] == [], last
    assert done.returncode == code, said


def test_a_disk_that_is_full_before_the_run_or_fills_up_during_it(disk: Path, tmp_path: Path, rows_file: Path) -> None:
    spec = tiny_spec(rows_file, tmp_path, train={"max_steps": 5000}, checkpoint={"every": 50})

    def fill_when_training() -> None:
        until(lambda: folders(tmp_path) and RunDir(folders(tmp_path)[0]).checkpoint_steps())
        fill_disk(disk)

    filler = threading.Thread(target=fill_when_training)
    filler.start()
    done, run = train(tmp_path, spec)
    filler.join()
    said = done.stdout + done.stderr
    assert newest_checkpoint(run)[0] >= 50, "the last good checkpoint stays"
    assert done.returncode in (1, 3) and "defect" not in said and "Traceback" not in said, said
    assert "No space left on device" in said or "are free" in said, said
    is_told(allranks("run", str(write_spec(tmp_path, spec)), cwd=tmp_path), "disk")
    is_told(allranks("report", run.name, cwd=tmp_path), run.name, "No space left on device", "free space there")
    is_told(allranks("export", run.name, cwd=tmp_path), "No space left on device", "--out")


@pytest.mark.parametrize(
    ("verb", "parts"),
    [
        (["report", "demo"], ("No space left on device", "free space there", "demo")),
        (["topo", "matrix.txt", "--svg", "runs/x.svg"], ("runs/x.svg", "No space left on device", "--svg")),
        (["trace", "traces", "--out", "runs/out"], ("runs/out", "No space left on device", "--out")),
        (["stage", "t.yaml", "--no-packages", "--to", "runs/stage"], ("runs/stage", "No space left on device")),
        (["compare", "t.yaml", "--strategies", "zero1,zero2"], ("disk", "runs")),
        (["smoke", "01", "--scale", "tiny"], ("runs", "No space left on device")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_verb_that_writes(disk: Path, tmp_path: Path, rows_file: Path, verb: list[str], parts: Any) -> None:
    run = complete_run(disk)
    (tmp_path / "matrix.txt").write_text(MATRIX)
    run.spec.write_text(write_spec(tmp_path, tiny_spec(rows_file, tmp_path)).read_text())
    write_ranks(tmp_path / "traces", [step(1, 0, 1000), op("aten::mm", 101, 105)])
    fill_disk(disk)
    is_told(allranks(*verb, cwd=tmp_path), *parts)


def test_a_closed_or_full_standard_output_does_not_end_a_run(tmp_path: Path, rows_file: Path) -> None:
    """The reader of the pipe ends at once; the run goes on, and its exit code is that of the training."""
    command = [*ALLRANKS, "run", str(write_spec(tmp_path, tiny_spec(rows_file, tmp_path)))]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(timeout=120), error) == (0, b"")
    (run,) = folders(tmp_path)
    assert RunDir(run).metrics.exists() and RunDir(run).report.exists()
