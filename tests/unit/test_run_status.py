"""What `report` and `runs` say of a run that nobody follows any more."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.cli.main import cli
from allranks.launch import runs
from allranks.launch.launchers import Launcher
from allranks.planning.planner import make_plan
from allranks.rundir.events import EventLog
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec


@pytest.fixture
def broken_off(tmp_path: Path) -> RunDir:
    """A run that has begun, and whose launcher was killed: it has no verdict."""
    spec = parse_spec(tiny_spec("builtin:instructions", tmp_path))
    run = RunDir(tmp_path / "runs" / "t-1")
    (run.root / "events").mkdir(parents=True)
    runs.write_request(run, spec, make_plan(spec, machine_facts()))
    log = EventLog(run.events_of(0), 0)
    log.write("start", attempt=1)
    log.close()
    return run


def verb(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words), standalone_mode=False)
    code = done.return_value if done.exception is None else getattr(done.exception, "exit_code", -1)
    return code, done.output + str(done.exception or "")


def status(run: RunDir) -> str:
    return json.loads(verb("runs", "--run-root", str(run.root.parent), "--json")[1])[0]["status"]


def test_a_run_whose_launcher_was_killed_does_not_run(broken_off: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(broken_off) == "unfinished"
    code, said = verb("report", str(broken_off.root))
    assert code == 1 and f"allranks resume {broken_off.root}" in " ".join(said.split())
    assert read_json(broken_off.metrics)["status"] == "unfinished"
    monkeypatch.setattr(Launcher, "is_running", lambda self, run, agents=None: True)
    assert verb("report", str(broken_off.root))[0] == 0
    assert status(broken_off) == "running"
    assert read_json(broken_off.metrics)["status"] == "unfinished", "a look must not replace the record of a run's end"
    monkeypatch.undo()  # killed after somebody had looked at it
    assert status(broken_off) == "unfinished"


def test_a_new_attempt_does_not_bear_an_earlier_verdict(broken_off: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(broken_off.metrics, {"status": "failed", "message": "rank 1 failed"})
    assert verb("report", str(broken_off.root), "--json")[0] == 1
    assert read_json(broken_off.metrics)["message"] == "rank 1 failed"
    monkeypatch.setattr(Launcher, "is_running", lambda self, run, agents=None: True)
    now = json.loads(verb("report", str(broken_off.root), "--json")[1])
    assert now["status"] == "running" and "message" not in now


@pytest.mark.parametrize("content", [None, "", "{}", '{"world_size": 2'])
def test_a_run_without_its_plan_is_refused_in_words(broken_off: RunDir, content: str | None) -> None:
    broken_off.plan.unlink()
    if content is not None:
        broken_off.plan.write_text(content)
    code, said = verb("report", str(broken_off.root))
    assert code == 2 and "plan.json" in said


@pytest.mark.parametrize("words", [("resume",), ("export",)])
def test_a_program_of_ones_own_has_no_checkpoints_to_go_on_from(broken_off: RunDir, words: tuple[str, ...]) -> None:
    broken_off.spec.write_text("script: {path: own.py}")
    code, said = verb(*words, str(broken_off.root))
    assert code == 2 and "your own program" in said


def test_a_comparison_of_nothing_is_refused(broken_off: RunDir) -> None:
    code, said = verb("compare", str(broken_off.spec), "--strategies", " , ")
    assert code == 2 and "--strategies is empty" in said


def test_runs_are_chosen_and_removed(broken_off: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ["--run-root", str(broken_off.root.parent)]
    for words, names in (("", ["t-1"]), ("--status failed", []), ("--since 1h", ["t-1"]), ("--size", ["t-1"])):
        rows = json.loads(verb("runs", *root, "--json", *words.split())[1])
        assert [row["run"] for row in rows] == names and all(row.get("bytes", 1) > 0 for row in rows)
    assert json.loads(verb("runs", *root, "--since", "2999-01-01", "--json")[1]) == []
    assert verb("runs", *root, "--since", "1x")[0] == 2
    monkeypatch.setattr(Launcher, "is_running", lambda self, run, agents=None: True)
    assert verb("runs", "rm", "t-1", "--yes", *root)[0] == 2 and broken_off.root.exists(), "it runs"
    monkeypatch.undo()
    (project := broken_off.root.parent / "project").mkdir()
    (project / "spec.yaml").write_text("name: mine")
    assert verb("runs", "rm", str(project), "--yes", *root)[0] == 2 and project.exists(), "not made by allranks"
    assert CliRunner().invoke(cli, ["runs", "rm", "t-1", *root], input="n\n", standalone_mode=False).return_value == 1
    assert verb("runs", "rm", "t-1", "--yes", *root)[0] == 0 and not broken_off.root.exists()
