"""The examples that come with the package: listed, copied, and planned in an empty folder, also from a wheel."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.launch import preview
from allranks.nodes import preflight
from allranks.spec.examples import describe_example, example_files
from tests.conftest import REPO

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def verb(empty: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Verb:
    """`allranks examples ...` in an empty folder: its exit code, output and errors."""

    def ends(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["allranks", "examples", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return (int(end.value.code or 0), *capfd.readouterr())

    return ends


@pytest.mark.parametrize("name", example_files())
def test_a_copy_can_be_planned_in_an_empty_folder(name: str, empty: Path, verb: Verb) -> None:
    code, out, _ = verb(name)
    copy = empty / f"{name.rpartition('/')[2]}.yaml"
    assert code == 0 and f"wrote {copy.name}; next: allranks plan {copy.name}" in out
    spec = preview.read_spec(copy)
    preflight.check_request(spec)
    assert copy.name in copy.read_text().partition("\nname:")[0], "its comment names the copy"
    assert f"examples/{name}.yaml" not in copy.read_text()
    if spec.cluster.device == "auto" or spec.cluster.launcher != "local":
        assert preview.plan(spec).world_size >= 1
    told = describe_example(name)
    assert len(told["summary"]) <= 70 and told["summary"].endswith(".")
    assert told["offline"] == (told["model"].startswith("tiny:"))


def test_the_list_has_a_line_for_each(verb: Verb) -> None:
    code, out, _ = verb()
    assert code == 0 and {line.split()[0] for line in out.splitlines() if line} >= set(example_files())
    rows = {row["name"]: row for row in json.loads(verb("--json")[1])}
    assert set(rows) == set(example_files())
    assert rows["demo"]["launcher"] == "local" and rows["demo"]["offline"] is True
    assert rows["mistral-7b-lora-ddp-2node"]["nodes"] == 2 and rows["mistral-7b-lora-ddp-2node"]["offline"] is False


def test_nothing_is_overwritten_without_force(empty: Path, verb: Verb) -> None:
    mine = empty / "demo.yaml"
    mine.write_text("mine")
    code, _, err = verb("demo")
    assert code == 2 and "demo.yaml exists" in err and "--force" in err and mine.read_text() == "mine"
    assert verb("demo.yaml", "--force")[0] == 0 and mine.read_text().startswith("# A tiny Mistral")
    (empty / "sub").mkdir()
    code, out, _ = verb("examples/demo.yaml", "--output", "sub", "--json")
    copy = (empty / "sub" / "demo.yaml").read_text()
    assert code == 0 and json.loads(out) == {"name": "demo", "file": "sub/demo.yaml", "text": copy}
    assert "allranks run sub/demo.yaml" in copy
    code, out, _ = verb("demo", "-o", "-")
    assert code == 0 and out == (REPO / "examples" / "demo.yaml").read_text()
    assert sorted(p.name for p in empty.iterdir()) == ["demo.yaml", "sub"]


PLAN_ALL = """
import sys
from pathlib import Path
import allranks
assert "site" in allranks.__file__, allranks.__file__
from allranks.cli.main import cli
from allranks.spec.examples import example_files
for name in example_files():
    copy = name.rpartition("/")[2] + ".yaml"
    assert not cli.main(["examples", name], standalone_mode=False)
    local_gpus = "device: cuda" in Path(copy).read_text() and "launcher" not in Path(copy).read_text()
    if not local_gpus:
        assert not cli.main(["plan", copy], standalone_mode=False)
    print("\\nplanned:", name)
"""


@pytest.mark.full
def test_a_wheel_has_them(tmp_path: Path) -> None:
    """Builds a wheel with pip, which fetches the build backend."""
    build = [sys.executable, "-m", "pip", "wheel", str(REPO), "--no-deps", "--quiet", "--wheel-dir", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=200)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("no network for the build backend")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    place = {"cwd": tmp_path / "empty", "env": env}
    done = subprocess.run([sys.executable, "-c", PLAN_ALL], **place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nplanned: ") == len(example_files())
    assert not list((tmp_path / "site").rglob("seeds"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dmeo"], "there is no example 'dmeo'; did you mean demo?"),
        (["seeds/000/one-node"], "there is no example"),
        (["../../etc/passwd"], "there is no example"),
        (["demo", "--output", "nowhere/x.yaml"], "the folder nowhere does not exist"),
        (["--output", "x.yaml"], "--output needs the NAME of an example"),
    ],
)
def test_wrong_requests(words: list[str], said: str, empty: Path, verb: Verb) -> None:
    code, _, err = verb(*words)
    assert code == 2 and said in err and not list(empty.iterdir())
