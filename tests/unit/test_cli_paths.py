"""Paths that cannot be used, given to every verb: said in words, with the exit code, and the rest still read."""

import os
import shutil
from pathlib import Path

import pytest

from tests.warm import allranks

OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity\n"


def verb(*words: str | Path) -> tuple[int, str]:
    """Exit code and all output of a verb, started without root's right to read everything."""
    done = allranks(*words, kind="light without rights" if os.geteuid() == 0 else "light")
    return done.returncode, " ".join((done.stdout + done.stderr).split())  # wherever lines were broken


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("no setpriv: root cannot be kept from reading")
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "x").write_text(OOM)
    folder.chmod(0)
    return folder


@pytest.mark.parametrize(
    "name", ["run", "plan", "data", "doctor", "stage", "compare", "lint", "topo", "diagnose", "trace"]
)
def test_a_file_that_may_not_be_read_ends_with_2_and_is_named(name: str, locked: Path) -> None:
    code, said = verb(name, locked / "x")
    assert code == 2 and str(locked / "x") in said and "Permission denied" in said
    assert "defect" not in said and "Usage" not in said


@pytest.mark.parametrize("name", ["runs", "report", "logs", "cancel", "resume", "export"])
def test_a_run_root_that_may_not_be_read_or_is_a_file_ends_with_2(name: str, locked: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root, why in ((locked, "Permission denied"), (tmp_path / "file", "Not a directory")):
        code, said = verb(name, "--run-root", root)
        assert (code, str(root) in said, why in said, "defect" in said) == (2, True, True, False), said


def test_what_can_be_read_is_diagnosed_beside_what_cannot(locked: Path, tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(OOM)
    secret = tmp_path / "secret.log"
    secret.write_text(OOM)
    secret.chmod(0)
    code, said = verb("diagnose", secret, locked / "x", locked, tmp_path / "good.log")
    assert code == 1 and "cuda_oom" in said
    assert said.count("Permission denied") == 3


def test_a_climb_that_could_not_write_its_report_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = verb("smoke", "01", "--scale", "tiny", "--run-root", tmp_path / "file")
    assert code == 3 and "run_root" in said and "01_single" not in said


def test_a_verb_that_is_not_there_names_the_nearest() -> None:
    code, said = verb("diagnos", "x")
    assert code == 2 and "did you mean diagnose?" in said
    assert verb("frob")[0] == 2
