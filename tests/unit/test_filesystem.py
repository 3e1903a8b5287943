"""What an OSError becomes, files under a umask, and outputs that nobody reads."""

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli.streams import Output
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.rundir.files import write_text_atomic
from allranks.utils.filesystem import apply_umask, current_umask, owner_of, with_file_name, write_error
from tests.conftest import REPO

RAISES = """
import sys
from allranks.cli import main, streams
from allranks.cli import runs
def fail(*args, **kwargs):
    raise OSError({number}, __import__("os").strerror({number}), {name!r})
runs.runs_command.callback = fail
sys.argv = ["allranks", "runs"]
main.main()
"""


def allranks(*args: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "allranks.cli.main", *args]
    return subprocess.run(command, cwd=REPO, timeout=60, check=False, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space there or choose another folder (for runs: --set run_root=FOLDER)"),
        (errno.EDQUOT, "quota"),
        (errno.ESTALE, "remount"),
        (errno.EACCES, "is owned by"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EPIPE, "process at the other end"),
        (errno.ENOENT, "removed in the meantime"),
        (errno.ENOTSUP, "--debug"),
    ],
)
def test_an_os_error_ends_a_verb_with_3_and_one_paragraph(number: int, cure: str, tmp_path: Path) -> None:
    name = str(tmp_path / "events" / "x.json")
    command = [sys.executable, "-c", RAISES.format(number=number, name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), done.stderr
    assert all(part in done.stderr for part in (name, os.strerror(number), cure)) and "defect" not in done.stderr


def test_an_option_is_wrong_or_the_disk_is() -> None:
    wrong = write_error(Path("/no/such/x"), OSError(errno.ENOENT, "No such file or directory"), "--out")
    full = write_error(Path("/full/x"), OSError(errno.ENOSPC, "No space left on device"), "--out")
    assert isinstance(wrong, RequestError) and isinstance(full, EnvironmentNotAble)
    cure = "free space there or choose another with --out"
    assert str(full) == f"/full/x cannot be written: No space left on device; {cure}"


def test_a_write_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the-file"), with_file_name(tmp_path / "the-file"):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    with pytest.raises(FileNotFoundError) as found:
        write_text_atomic(tmp_path / "gone" / "metrics.json", "{}")
    assert found.value.filename == str(tmp_path / "gone" / "metrics.json")
    (tmp_path / f".a.json.{os.getpid()}.tmp").mkdir()  # what a process of the same number left, which cannot be opened
    write_text_atomic(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}"
    assert owner_of(tmp_path / "a" / "b").startswith(f"{tmp_path} is owned by ")


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_get_the_mode_that_open_gives(tmp_path: Path, umask: int) -> None:
    (tmp_path / "sub").mkdir()
    for name, mode in (("sub/a", 0o600), ("run", 0o700), ("wide", 0o666)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "link").symlink_to("/etc/hostname")
    before = os.umask(umask)
    try:
        assert current_umask() == umask
        apply_umask(tmp_path)
    finally:
        os.umask(before)
    assert [(tmp_path / n).stat().st_mode & 0o777 for n in ("sub/a", "wide")] == [0o666 & ~umask] * 2
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o666 & ~umask | 0o100


def test_a_reader_that_ends_early_changes_no_exit_code() -> None:
    """`allranks ... | head -1`: quiet, and the code that it would have had."""
    for args, code in ((["failures"], 0), (["lint", "no-such-file"], 2)):
        read, write = os.pipe()
        os.close(read)
        done = allranks(*args, stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert done.returncode == code, done.stderr
        assert b"Broken pipe" not in done.stderr and b"Traceback" not in done.stderr


def test_a_terminal_that_hung_up() -> None:
    """Writing to it gives EIO."""
    leader, follower = pty.openpty()
    os.close(leader)
    done = allranks("failures", stdin=subprocess.DEVNULL, stdout=follower, stderr=follower)
    os.close(follower)
    assert done.returncode == 0


def test_a_full_disk_under_standard_output_is_told() -> None:
    with Path("/dev/full").open("wb") as full:
        done = allranks("failures", "--json", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 3
    assert done.stderr.startswith(b"allranks: standard output cannot be written: No space left on device")
    assert done.stderr.count(b"\n") == 1


def test_closed_descriptors_are_not_given_to_files(tmp_path: Path) -> None:
    """With standard output closed, the next file that is opened would get number 1, and take what children print."""
    code = """from allranks.cli.streams import protect; protect()
import subprocess
file = open('x', 'w'); subprocess.run(['echo', 'hello'], check=True); print('also')"""
    subprocess.run(["bash", "-c", '"$0" -c "$1" >&- <&-', sys.executable, code], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "x").read_text() == ""


def test_an_output_that_failed_once_takes_and_drops_the_rest() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    output = Output(fd)
    assert output.write(b"abc") == 3 and output.write(b"de") == 2
    assert output.error is not None and output.error.errno == errno.ENOSPC
    os.close(fd)


def test_ctrl_c_while_python_imports_the_verb_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO / 'src'}"}
    command = [sys.executable, "-m", "allranks", "--help"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"allranks: interrupted\n")
