"""``cluster.python`` under every launcher, and what `plan` says of one that is missing. Real programs."""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.launch.hosts import node_commands
from allranks.launch.slurm.script import render_batch_script
from allranks.nodes.preflight.request import check_request
from allranks.nodes.rank_command import ask_interpreter, environment_commands, in_environment
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, parse_spec
from tests.dist.harness import allranks
from tests.unit.test_plan import facts


def spec_of(folder: Path, python: str | None, **more: Any) -> RunSpec:
    (folder / "own.py").write_text("")
    return parse_spec({"script": {"path": str(folder / "own.py")}, "cluster": {"python": python, **more}})


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own, in a folder whose name a shell would split."""
    folder = tmp_path_factory.mktemp("envs") / "my env"
    venv.create(folder, with_pip=False)
    return folder


def prefix_of(command: list[str]) -> str:
    ask = [*command, "-c", "import sys; print(sys.prefix)"]
    return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize("tail", ["", "bin/python3"])
def test_every_launcher_starts_the_python_that_is_named(environment: Path, tmp_path: Path, tail: str) -> None:
    """Their commands are run up to the Python that they start, which tells its environment."""
    wanted = str(environment / tail) if tail else str(environment)
    spec = spec_of(tmp_path, wanted)
    run, plan = RunDir(tmp_path / "run"), make_plan(spec, facts())
    _, python = environment_commands(wanted, sys.executable)
    assert prefix_of(in_environment(wanted, python)) == str(environment)
    batch = render_batch_script(spec, plan, run, sys.executable)
    (by_hand,) = node_commands(spec, run, plan, folder=tmp_path)
    tell = "-c 'import sys; print(sys.prefix)'"
    for text, module in ((batch, "-m allranks.launch.driver"), (by_hand, "-m allranks.launch.agent")):
        at = text.index(module)
        command = ["bash", "-c", text[:at] + tell]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == str(environment), text


def test_a_missing_one_is_refused_with_key_and_file(tmp_path: Path) -> None:
    for wanted, file in ((tmp_path / "no", tmp_path / "no" / "bin" / "activate"), (tmp_path / "bin" / "python3", None)):
        with pytest.raises(SpecError, match=rf"cluster\.python {wanted}: there is no {file or wanted}"):
            check_request(spec_of(tmp_path, str(wanted)))
    check_request(spec_of(tmp_path, str(tmp_path / "no"), launcher="slurm"))  # the nodes may have it
    with pytest.raises(SpecError, match=r"cluster\.python: only srun can enter a pyxis: image"):
        spec_of(tmp_path, "pyxis:image")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"module": "no_such_module_here"}, "script.module no_such_module_here: there is no such module in"),
        ({"module": "json.no_such_part"}, "script.module json.no_such_part: there is no such module"),
        ({"path": "own.py", "workdir": "nowhere"}, "script.workdir .*nowhere: there is no such folder"),
        ({"path": "deep.py", "workdir": "work"}, "work/deep.py exists: script.path does not depend on script.workdir"),
        ({"path": "own.py", "module": "own"}, "set either script.path"),
        ({"args": ["x"]}, "set either script.path"),
    ],
)
def test_an_absent_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Any, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "deep.py").write_text("")
    with pytest.raises(SpecError, match=said):
        check_request(parse_spec({"script": script}))
    for good in ({"module": "own"}, {"module": "deep", "workdir": "work"}, {"module": "json.tool"}, {"path": "own.py"}):
        check_request(parse_spec({"script": good}))


def test_plan_shows_the_program_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    args = "[--api-key, sk-abcdefghijklmnopqrstuvwxyz123456, a b]"
    (tmp_path / "s.yaml").write_text(f"script: {{module: own, args: {args}, workdir: {tmp_path}, grace_s: 7}}\n")
    done = allranks("plan", "s.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("program: ")]
    assert line.startswith("program: python -m own --api-key ") and "'a b'" in line and str(tmp_path) in line
    assert line.endswith("SIGKILL after 7 s")
    assert "abcdefghij" not in done.stdout


def test_one_without_allranks_is_refused_before_a_start(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(EnvironmentNotAble, match=r"cluster\.python .*my env has no allranks"):
        ask_interpreter(str(environment), [])
    assert ask_interpreter(sys.prefix, ["torch", "no_such_package"]).missing == ["no_such_package"]
