"""The shared cache: one builder, takeover of the dead, repair of the damaged. Real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.errors import EnvironmentNotAble
from allranks.rundir import shared_cache
from allranks.rundir.files import write_json
from tests.dist.harness import until

BUILDER = """
import sys, time, pathlib
from allranks.rundir import shared_cache as cache
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def build(into):
    with (folder / "builds.log").open("a") as f: f.write("built\\n")
    (into / "part").write_text("half")
    time.sleep(seconds)
    (into / "part").write_text("whole")
entry, how = cache.get_or_build(folder, "key", build, print)
print(how, (entry / "part").read_text())
"""

BEATER = """
import sys, time, json, pathlib
claim = pathlib.Path(sys.argv[1])
for i in range(8):
    claim.write_text(json.dumps({"host": "elsewhere", "pid": 1, "beat": i}))
    time.sleep(0.25)
claim.unlink()
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def builds(folder: Path) -> int:
    """Return how often it was built, once nothing but the entry is left."""
    assert {path.name for path in folder.iterdir()} == {"key", "builds.log"}
    return len((folder / "builds.log").read_text().splitlines())


def test_eight_processes_build_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0.5) for _ in range(8)]
    outputs = [p.communicate(timeout=60)[0].splitlines()[-1] for p in processes]
    assert builds(tmp_path) == [output.split()[0] for output in outputs].count("built") == 1
    assert all(output.endswith(" whole") for output in outputs)


def test_a_killed_builder_is_taken_over(tmp_path: Path) -> None:
    first = start(tmp_path, 60)
    until((tmp_path / "builds.log").exists)
    waiters = [start(tmp_path, 0) for _ in range(2)]
    time.sleep(0.7)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    outputs = [p.communicate(timeout=30)[0] for p in waiters]
    assert builds(tmp_path) == 2
    assert all(output.splitlines()[-1].endswith(" whole") for output in outputs)
    assert any("has died" in output for output in outputs)


def obtain(folder: Path) -> tuple[str, str]:
    """Return how it was obtained, and all that was printed meanwhile."""
    said: list[str] = []

    def build(into: Path) -> None:
        (into / "part").write_text("whole")

    entry, how_obtained = shared_cache.get_or_build(folder, "key", build, said.append)
    assert (entry / "part").read_text() == "whole"
    return how_obtained, "\n".join(said)


@pytest.mark.parametrize(
    ("file", "content"), [("part", "whale"), ("part", "w"), ("part", None), ("manifest.json", "{")]
)
def test_a_damaged_entry_is_built_anew(tmp_path: Path, file: str, content: str | None) -> None:
    assert [obtain(tmp_path)[0] for _ in range(2)] == ["built", "found"]
    (tmp_path / "key" / file).unlink()
    if content is not None:
        (tmp_path / "key" / file).write_text(content)
    result, said = obtain(tmp_path)
    assert result == "rebuilt" and "damaged" in said
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_silent_builder_elsewhere_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "STALE_S", 0.5)
    write_json(tmp_path / "key.claim", {"host": "elsewhere", "pid": 1, "beat": "x"})
    result, said = obtain(tmp_path)
    assert result in ("built", "waited") and "has died" in said


def test_a_beating_builder_elsewhere_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "STALE_S", 0.6)
    beat = subprocess.Popen([sys.executable, "-c", BEATER, str(tmp_path / "key.claim")])
    until((tmp_path / "key.claim").exists)
    began = time.monotonic()
    _, said = obtain(tmp_path)
    beat.wait(timeout=10)
    assert time.monotonic() - began > 1.0
    assert "has died" not in said


def test_a_reused_process_number_is_not_the_builder(tmp_path: Path) -> None:
    process = {"host": shared_cache.host_name(), "place": shared_cache._place(), "pid": os.getpid()}
    write_json(tmp_path / "key.claim", {**process, "started": 1.0, "beat": "x"})
    assert "has died" in obtain(tmp_path)[1]


def test_an_error_while_building_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "x").write_text("1")
        raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentNotAble, match="No space left"):
        shared_cache.get_or_build(tmp_path, "key", fail, print)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentNotAble, match=r"cluster\.cache"):
        shared_cache.get_or_build(tmp_path / "file" / "c", "key", lambda into: None, print)
