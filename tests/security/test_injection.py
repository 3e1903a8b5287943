"""Values of a spec in the batch script: each stays one word, whatever it holds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import AllranksError
from allranks.launch.launchers import agent_command
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.data_templates import require_template
from allranks.utils.machine import machine_facts
from tests.sampling import every_fifth

PAYLOADS = [
    "$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '", '"; touch PWNED; "', "x; touch PWNED", "x && touch PWNED", "x | touch PWNED",
    "a\ntouch PWNED", "a\n#SBATCH --wrap=touch", "a\rtouch PWNED", "\x1b]0;x\x07", "{{ 7*7 }}", "{% raw %}", "${PATH}", "--help", "-x", "%j%u", "%s%n",
    "x\\", "a b", "*", "~root", "!!",
]  # fmt: skip
BASE = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def script(tmp_path: Path, **cluster: Any) -> str:
    spec = parse_spec({**BASE, "cluster": {"launcher": "slurm", "nodes": 2, **cluster}})
    return render_batch_script(spec, make_plan(spec, machine_facts()), RunDir(tmp_path / "run"), "true")


@pytest.mark.parametrize("text", every_fifth(PAYLOADS))
@pytest.mark.parametrize(
    "cluster",
    [
        {"modules": ["@"]},
        {"modules": ["first", "@"]},
        {"env": {"NAME": "@"}},
        {"python": "@"},
        {"python": "conda:@"},
        {"python": "pyxis:@"},
        {"python": "/x/@.sif"},
        {"slurm": {"partition": "@", "account": "@", "qos": "@", "constraint": "@", "gres": "@", "reservation": "@"}},
        {"slurm": {"mem": "@", "chdir": "@", "exclude": ["@"]}},
        {"slurm": {"extra": ["--comment=@"]}},
        {"slurm": {"extra": ["@"]}},
    ],
    ids=str,
)
def test_value_is_one_word_or_refused(tmp_path: Path, cluster: dict[str, Any], text: str) -> None:
    try:
        made = script(tmp_path, **_filled(cluster, text))
    except AllranksError as error:
        assert "\x1b" not in str(error)
        return
    options = [line for line in made.splitlines() if line.startswith("#SBATCH")]
    assert not any("--wrap" in line for line in options)
    assert "49" not in made.replace(str(tmp_path), "")
    path = tmp_path / "job.sbatch"
    path.write_text(made)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    # the functions stand for the programs of a cluster; what remains is what the shell makes of the values
    stubs = (
        "module() { :; }; conda() { :; }; eval() { :; }; source() { :; }; export -f module conda eval source; exec "
        "bash job.sbatch"
    )
    subprocess.run(["bash", "-c", stubs], cwd=tmp_path, capture_output=True, timeout=20, check=False)
    assert not (tmp_path / "PWNED").exists() and not (tmp_path / "run" / "PWNED").exists()


def _filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {k: _filled(v, text) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, text) for v in value]
    return value.replace("@", text)


@pytest.mark.parametrize("name", ["A;touch PWNED", "A=B", "A B", "$(x)", "A\nB", "-x", ""])
def test_names_of_variables_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(AllranksError):
        script(tmp_path, env={name: "1"})


@pytest.mark.parametrize("text", PAYLOADS)
def test_paths_are_words_of_the_container(tmp_path: Path, text: str) -> None:
    """A data path reaches srun as one argument, never as an option of its own."""
    folder = tmp_path / text.replace("/", "_").replace("\0", "")
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    for image in ("pyxis:img", "/x.sif"):
        raw = {
            **BASE,
            "data": {"source": str(folder / "rows.jsonl")},
            "cluster": {"launcher": "slurm", "nodes": 2, "python": image},
        }
        spec = parse_spec(raw)
        options, words = agent_command(spec, make_plan(spec, machine_facts()), RunDir(tmp_path / "run"), "python")
        for word in (*options, *words):
            assert word in ("apptainer", "exec", "python", "/x.sif", "--nv") or word.startswith(
                ("--container-", "--bind=")
            )


@pytest.mark.parametrize("text", [p for p in PAYLOADS if p.strip()])
def test_names_of_runs_are_refused(text: str) -> None:
    with pytest.raises(AllranksError, match="run name"):
        parse_spec({**BASE, "name": text})


@pytest.mark.parametrize(
    "text",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}"],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pytest.importorskip("jinja2")
    from allranks.errors import DataError
    from allranks.spec.data_templates import _jinja

    monkeypatch.chdir(tmp_path)
    (tmp_path / "form.jinja").write_text(text)
    require_template(str(tmp_path / "form.jinja"))
    with pytest.raises(DataError, match="unsafe"):
        _jinja(tmp_path / "form.jinja", mask_prompt=False)({"text": "a"}, 0)
    assert not os.path.exists("PWNED")  # noqa: PTH110
