"""One cache and two users with different permissions. Real users (root only), no torch."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.other_users import ANN, BEN, GROUP, ended, need_users, shared_folder, shared_place, start_as

OBTAIN = """
import sys, time, pathlib
from allranks.errors import AllranksError
from allranks.rundir import shared_cache as cache
folder, private, key, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
private = None if private == "-" else pathlib.Path(private)
def build(into):
    (into / "sub").mkdir()
    (into / "sub" / "part").touch(mode=0o600)  # as safetensors does
    (into / "sub" / "part").write_text("whole")
    time.sleep(seconds)
try:
    entry, how = cache.get_or_build(folder, key, build, lambda text: print(text, flush=True), 60, private)
except AllranksError as error:
    print("refused", error.exit_code, error)
else:
    print(how, entry, (entry / "sub" / "part").read_text())
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    need_users()
    with shared_place(tmp_path) as made:
        yield made


@pytest.fixture
def cache(place: Path) -> Path:
    return shared_folder(place)


def obtain(uid: int, cache: Path, *, key: str = "key", own: bool = True, umask: int = 0o002) -> list[str]:
    """What a user's process says; the last line is the outcome."""
    args = (str(cache / "data"), str(cache / f"allranks-{uid}") if own else "-", key, "0")
    code, output = ended(start_as(uid, cache.parent, "-c", OBTAIN, *args, umask=umask))
    assert code == 0 and "Traceback" not in output, output
    return output.splitlines()


def test_with_umask_0002_both_read_and_add(cache: Path) -> None:
    assert obtain(ANN, cache) == [f"built {cache}/data/key whole"]
    assert obtain(BEN, cache) == [f"found {cache}/data/key whole"]
    assert obtain(BEN, cache, key="other") == [f"built {cache}/data/other whole"]
    for path in (cache / "data").rglob("*"):
        seen = path.stat().st_gid, stat.S_IMODE(path.stat().st_mode) & 0o777
        assert seen == (GROUP, 0o775 if path.is_dir() else 0o664), path


def test_both_at_once_build_one_entry(place: Path, cache: Path) -> None:
    args = ("-c", OBTAIN, str(cache / "data"), "-", "key", "0.5")
    both = [start_as(uid, place, *args) for uid in (ANN, BEN) for _ in range(3)]
    last = [ended(p)[1].splitlines()[-1] for p in both]
    assert sum(line.startswith("built") for line in last) == 1 and all(line.endswith(" whole") for line in last), last
    assert [p.name for p in (cache / "data").iterdir()] == ["key"]


@pytest.mark.parametrize("open_folder", [True, False])
def test_what_another_user_closed_is_built_in_a_folder_of_ones_own(cache: Path, open_folder: bool) -> None:
    """Under umask 0077 the entry cannot be read; without an open folder above it, nothing in it can even be seen."""
    if open_folder:
        obtain(ANN, cache, key="first")
    obtain(ANN, cache, umask=0o077)
    said = obtain(BEN, cache)
    assert said[-1] == f"built {cache}/allranks-{BEN}/key whole", said
    for part in (str(cache / "data"), f"uid {ANN}", "drwx--S---", "chmod -R g+rwX"):
        assert part in said[0], said
    assert obtain(BEN, cache)[-1] == f"found {cache}/allranks-{BEN}/key whole"
    assert obtain(ANN, cache) == [f"found {cache}/data/key whole"]  # nobody has taken it away


def test_umask_0022_lets_others_read_and_sends_what_they_add_elsewhere(cache: Path) -> None:
    obtain(ANN, cache, umask=0o022)
    assert obtain(BEN, cache) == [f"found {cache}/data/key whole"]
    said = obtain(BEN, cache, key="other")
    assert said[-1] == f"built {cache}/allranks-{BEN}/other whole" and "cannot be written" in said[0], said


def test_without_any_place_the_message_names_folder_owner_and_cure(cache: Path) -> None:
    obtain(ANN, cache, umask=0o077)
    cache.chmod(0o2750)
    (line,) = obtain(BEN, cache, own=False)
    for part in ("refused 3", str(cache / "data"), f"uid {ANN}", "--set cluster.cache=FOLDER"):
        assert part in line
    said = obtain(BEN, cache)
    assert said[-1].startswith("refused 3") and f"allranks-{BEN}" in said[-1] and "chmod" in said[-1], said


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_a_killed_users_claim_in_a_sticky_cache(place: Path, cache: Path, umask: int) -> None:
    """There nobody may remove another user's claim, even a dead one; closed, it cannot be read either."""
    (cache / "data").mkdir()
    os.chown(cache / "data", 0, GROUP)
    for folder in (cache, cache / "data"):
        folder.chmod(0o3770)
    first = start_as(ANN, place, "-c", OBTAIN, str(cache / "data"), "-", "key", "60", umask=umask)
    deadline = time.monotonic() + 30
    while not list((cache / "data").glob("key.tmp-*/sub/part")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.kill()
    first.wait(timeout=10)
    said = obtain(BEN, cache)
    assert said[-1] == f"built {cache}/allranks-{BEN}/key whole" and f"uid {ANN}" in said[0], said
    assert obtain(ANN, cache)[-1].startswith("built")  # its owner clears it away


def test_a_damaged_entry_in_a_sticky_cache_is_not_touched(cache: Path) -> None:
    cache.chmod(0o3770)
    obtain(ANN, cache)
    (cache / "data").chmod(0o3770)
    (cache / "data" / "key" / "sub" / "part").write_text("whale")
    said = obtain(BEN, cache)
    assert said[-1] == f"built {cache}/allranks-{BEN}/key whole" and any("damaged" in s for s in said), said


def test_a_runtime_folder_of_another_user_and_a_home_that_is_absent(place: Path) -> None:
    """`su` keeps XDG_RUNTIME_DIR, which is closed to the new user; in containers a user may have no home."""
    runtime = place / "runtime"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, ANN, GROUP)
    root = "from allranks.nodes.slurm.endpoints import state_root; print(state_root())"
    look = f"import os; os.environ['XDG_RUNTIME_DIR'] = {str(runtime)!r}; {root}"
    assert ended(start_as(ANN, place, "-c", look))[1].strip() == f"{runtime}/allranks"
    assert ended(start_as(BEN, place, "-c", look))[1].strip() == f"{place}/user{BEN}/.local/state/allranks"
    roots = "from allranks.utils.filesystem import cache_root; print(cache_root('/x')); cache_root(None)"
    said = ended(start_as(ANN, place, "-c", f"import os; del os.environ['HOME']; {roots}"))[1]
    assert "/x" in said.splitlines()
    assert "allranks.errors.EnvironmentNotAble" in said and "set HOME, HF_HOME" in said


STORE = """
import sys; from allranks.nodes.staging.bundles import store_of; from allranks.spec import parse_spec
raw = {'model': {'name': 'tiny:mistral'}, 'data': {'source': 'builtin:news'}, 'cluster': {'cache': sys.argv[1]}}
store = store_of(parse_spec(raw)); print(store); store.mkdir(parents=True)
"""


def test_bundles_of_a_second_user_get_a_place(place: Path, cache: Path) -> None:
    said = [ended(start_as(uid, place, "-c", STORE, str(cache), umask=0o022)) for uid in (ANN, BEN)]
    assert said == [(0, f"{cache}/allranks/stage-{ANN}\n"), (0, f"{cache}/allranks-{BEN}/stage\n")]
