"""The file by which Slurm's clients find a cluster in a box: when it counts, which of several, how to enter it."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.slurm import commands, endpoints
from allranks.nodes.slurm.endpoints import find_endpoint, read_endpoint

NOBODY = 65534


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(endpoints, "state_root", lambda: tmp_path / "state")
    monkeypatch.delenv(endpoints.NAME_VARIABLE, raising=False)
    yield tmp_path / "state"


def publish(root: Path, name: str = "box", **changes: Any) -> Path:
    """Write the file of a cluster whose login side is this process."""
    record = {
        "version": endpoints.VERSION, "name": name, "boot_id": endpoints.boot_id(), "pid": os.getpid(),
        "start_ticks": endpoints.start_ticks(os.getpid()), "enter": ["/usr/bin/nsenter", "--target=1"],
        "inside": "/nowhere", "environment": {"SLURM_CONF": "/x y/slurm.conf"},
    }  # fmt: skip
    path = root / name / endpoints.CLIENT_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record | changes))
    path.chmod(0o600)
    return path


def test_a_cluster_whose_login_side_lives_is_found(root: Path) -> None:
    assert find_endpoint() is None, "there is not even the folder of all boxes"
    publish(root)
    found = find_endpoint()
    assert found is not None and found.name == "box" and found.is_alive()
    command = found.command_prefix("/a b")
    assert command[:2] == ["/usr/bin/nsenter", "--target=1"]
    assert command[3:] == ["--chdir=/a b", "SLURM_CONF=/x y/slurm.conf"]


def test_inside_the_cluster_it_is_not_entered_again(root: Path) -> None:
    publish(root, inside="/proc")
    found = find_endpoint()
    assert found is not None and Path(found.command_prefix("/")[0]).name == "env"
    done = subprocess.run([*found.command_prefix("/"), "pwd"], capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout == "/\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"start_ticks": 1}, {"boot_id": "of an earlier boot"}, {"pid": 2**22 + 1}, {"version": endpoints.VERSION + 1},
        {"enter": "nsenter"},
    ],
)  # fmt: skip
def test_a_file_that_does_not_hold_any_more_is_no_cluster(root: Path, changes: dict[str, Any]) -> None:
    assert read_endpoint(publish(root, **changes).parent) is None and find_endpoint() is None


def test_a_login_side_that_ended_is_no_cluster(root: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    folder = publish(root, pid=child.pid, start_ticks=endpoints.start_ticks(child.pid)).parent
    assert read_endpoint(folder) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_endpoint(folder) is None, "a zombie does not count"
    child.wait(timeout=10)
    assert read_endpoint(folder) is None


def test_a_process_name_with_brackets_and_blanks_does_not_hide_its_start(tmp_path: Path) -> None:
    odd = tmp_path / "a) b (c"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "60"]) as child:
        mine, started = endpoints.start_ticks(os.getpid()), endpoints.start_ticks(child.pid)
        child.kill()
    assert mine is not None and started is not None and started >= mine


def test_half_a_file_a_pipe_and_a_huge_file_are_no_cluster(root: Path) -> None:
    path = publish(root)
    whole = path.read_text()
    for text in (whole[: len(whole) // 2], " " * endpoints.MAX_BYTES + whole):
        path.write_text(text)
        assert find_endpoint() is None
    path.unlink()
    os.mkfifo(path)
    assert find_endpoint() is None


def test_words_that_others_could_have_written_are_not_executed(root: Path, tmp_path: Path) -> None:
    path = publish(root)
    path.chmod(0o620)
    assert find_endpoint() is None
    path.chmod(0o600)
    assert find_endpoint() is not None
    if os.geteuid() != 0:
        pytest.skip("a file of another user takes root")
    foreign = path.rename(tmp_path / "foreign.json")
    os.chown(foreign, NOBODY, NOBODY)
    path.symlink_to(foreign)
    assert find_endpoint() is None, "the link is ours, the file is not"
    path.unlink()
    foreign.rename(path)
    assert find_endpoint() is None


def test_of_several_clusters_one_must_be_meant(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(asked: str | None = None) -> str | None:
        found = find_endpoint(asked)
        return found.name if found else None

    publish(root, "a")
    assert name() == "a", "the only one"
    publish(root, "b")
    with pytest.raises(RequestError, match=r"a, b.*ALLRANKS_BOX"):
        find_endpoint()
    assert name("b") == "b"
    for variable, meant in (("a", "a"), ("../state/a", None)):
        monkeypatch.setenv(endpoints.NAME_VARIABLE, variable)
        assert name() == meant, "no path is made of the name"
    monkeypatch.delenv(endpoints.NAME_VARIABLE)
    publish(root, "box")
    assert name() == "box", "the default name"


def test_slurm_is_called_through_the_file(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda name: None if name == "scontrol" else f"/usr/bin/{name}")
    with pytest.raises(EnvironmentNotAble, match="allranks cluster up"):
        commands.find_slurm(tmp_path)
    publish(root)
    slurm = commands.find_slurm(tmp_path)
    found = find_endpoint()
    assert found is not None and slurm.prefix == found.command_prefix(tmp_path) and "'box'" in slurm.label
