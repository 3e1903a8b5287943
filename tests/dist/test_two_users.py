"""Two users train at the same time on one machine, with one cache that their group shares. Root starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import write_spec
from tests.other_users import ANN, BEN, ended, home_of, need_users, shared_folder, shared_place, start_as

pytestmark = pytest.mark.dist


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    need_users()
    with shared_place(tmp_path) as made:
        write_rows(made / "rows.json", 40)
        (made / "rows.json").chmod(0o644)
        yield made


def start_run(uid: int, place: Path, cache: Path, umask: int = 0o002) -> Any:
    home = home_of(place, uid)
    spec = tiny_spec(place / "rows.json", home, cluster={"cache": str(cache), "procs_per_node": 2})
    path = write_spec(home, spec)
    path.chmod(0o644)
    return start_as(uid, place, "-m", "allranks.cli.main", "run", str(path), umask=umask)


def metrics_of(uid: int, place: Path) -> dict[str, Any]:
    (run,) = (home_of(place, uid) / "runs").iterdir()
    return json.loads((run / "metrics.json").read_text())


def test_two_users_train_at_once_with_one_cache(place: Path) -> None:
    cache = shared_folder(place)
    both = {uid: start_run(uid, place, cache) for uid in (ANN, BEN)}
    for process in both.values():
        code, output = ended(process, 180)
        assert code == 0, output
        assert "is used instead" not in output
    assert len(list((cache / "allranks" / "data").iterdir())) == 1
    first, second = (metrics_of(uid, place)["train_loss_last"] for uid in (ANN, BEN))
    assert first == second
    run = next((home_of(place, ANN) / "runs").iterdir())
    weights = [*run.glob("checkpoints/step-*/*.safetensors"), *run.glob("model/*.safetensors")]
    assert weights and all(
        path.stat().st_mode & 0o777 == 0o600 for path in weights
    )  # a run is private, the cache is not
    cached = [path for path in (cache / "allranks" / "data").rglob("*") if path.is_file()]
    assert cached and all(path.stat().st_mode & 0o777 == 0o664 for path in cached)


def test_a_cache_that_the_first_user_closed(place: Path) -> None:
    """Under umask 0077 the second user cannot even see what the first has prepared, and trains all the same."""
    cache = shared_folder(place)
    assert ended(start_run(ANN, place, cache, umask=0o077), 180)[0] == 0
    code, output = ended(start_run(BEN, place, cache), 180)
    assert code == 0 and "Traceback" not in output, output
    assert list((cache / f"allranks-{BEN}" / "data").iterdir())
    (run,) = (home_of(place, BEN) / "runs").iterdir()
    logs = "".join(path.read_text() for path in run.glob("logs/attempt-1/*.rank*.log"))
    assert "cannot be" in logs and f"uid {ANN}" in logs and "chmod -R g+rwX" in logs, logs + output
