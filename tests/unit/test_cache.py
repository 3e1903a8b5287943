"""The shared cache: one builder, takeover of the dead, repair of the damaged. Real processes, real kills."""

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
    return len((folder / "builds.log").read_text().splitlines())


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name not in ("key", "builds.log")]


def test_eight_processes_build_once(tmp_path: Path) -> None:
    outputs = [p.communicate(timeout=60)[0].splitlines()[-1] for p in [start(tmp_path, 0.5) for _ in range(8)]]
    assert builds(tmp_path) == 1
    assert sorted(o.split()[0] for o in outputs).count("built") == 1
    assert all(o.endswith(" whole") for o in outputs)
    assert leftovers(tmp_path) == []


def test_a_killed_builder_is_taken_over(tmp_path: Path) -> None:
    first = start(tmp_path, 60)
    until((tmp_path / "builds.log").exists)
    waiters = [start(tmp_path, 0) for _ in range(2)]
    time.sleep(0.7)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    outputs = [p.communicate(timeout=30)[0] for p in waiters]
    assert builds(tmp_path) == 2
    assert all(o.splitlines()[-1].endswith(" whole") for o in outputs)
    assert any("has died" in o for o in outputs)
    assert leftovers(tmp_path) == []


def obtain(folder: Path, text: str = "whole") -> tuple[str, list[str]]:
    said: list[str] = []
    write = lambda into: (into / "part").write_text(text) and None  # noqa: E731
    entry, how = shared_cache.get_or_build(folder, "key", write, said.append)
    assert (entry / "part").read_text() == text
    return how, said


@pytest.mark.parametrize("harm", ["bytes", "size", "missing", "manifest"])
def test_a_damaged_entry_is_built_anew(tmp_path: Path, harm: str) -> None:
    assert obtain(tmp_path)[0] == "built"
    assert obtain(tmp_path)[0] == "found"
    part = tmp_path / "key" / "part"
    if harm == "bytes":
        part.write_text("whale")
    elif harm == "size":
        part.write_text("w")
    elif harm == "missing":
        part.unlink()
    else:
        (tmp_path / "key" / "manifest.json").write_text("{")
    how, said = obtain(tmp_path)
    assert how == "rebuilt"
    assert "damaged" in said[0]
    assert leftovers(tmp_path) == []


def test_a_silent_builder_elsewhere_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "STALE_S", 0.5)
    write_json(tmp_path / "key.claim", {"host": "elsewhere", "pid": 1, "beat": "x"})
    how, said = obtain(tmp_path)
    assert how in ("built", "waited")
    assert any("has died" in s for s in said)


def test_a_beating_builder_elsewhere_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "STALE_S", 0.6)
    beat = subprocess.Popen([sys.executable, "-c", BEATER, str(tmp_path / "key.claim")])
    until((tmp_path / "key.claim").exists)
    began = time.monotonic()
    _, said = obtain(tmp_path)
    beat.wait(timeout=10)
    assert time.monotonic() - began > 1.0
    assert not any("has died" in s for s in said)


def test_a_reused_process_number_is_not_the_builder(tmp_path: Path) -> None:
    place = {"host": shared_cache.host_name(), "place": shared_cache._place()}
    write_json(tmp_path / "key.claim", {**place, "pid": os.getpid(), "started": 1.0, "beat": "x"})
    assert any("has died" in s for s in obtain(tmp_path)[1])


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
