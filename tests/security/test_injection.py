"""Values of a spec in the batch script, in pages and in CSV cells: each stays one word or text, whatever it holds."""

import csv
import io
import os
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import AllranksError, DataError
from allranks.experiments.gates import ComparisonRow, Gates
from allranks.experiments.output import comparison_page, csv_text
from allranks.lab.smoke import records
from allranks.lab.smoke import report as smoke_report
from allranks.launch.launchers import agent_command
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.data_templates import _jinja, require_template
from allranks.utils.machine import machine_facts
from allranks.utils.text import csv_cell
from tests.sampling import every_fifth
from tests.unit.test_smoke_criteria import ladder, result

PAYLOADS = [
    "$(touch PWNED)", "`touch PWNED`", "'; touch PWNED; '", '"; touch PWNED; "', "x; touch PWNED", "x && touch PWNED",
    "x | touch PWNED", "a\ntouch PWNED", "a\n#SBATCH --wrap=touch", "a\rtouch PWNED", "\x1b]0;x\x07", "{{ 7*7 }}",
    "{% raw %}", "${PATH}", "--help", "-x", "%j%u", "%s%n", "x\\", "a b", "*", "~root", "!!",
]  # fmt: skip
BASE = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


def script(tmp_path: Path, **cluster: Any) -> str:
    spec = parse_spec({**BASE, "cluster": {"launcher": "slurm", "nodes": 2, **cluster}})
    return render_batch_script(spec, make_plan(spec, machine_facts()), RunDir(tmp_path / "run"), "true")


@pytest.mark.parametrize("text", every_fifth(PAYLOADS))
@pytest.mark.parametrize("cluster", [
    {"modules": ["@"]}, {"modules": ["first", "@"]}, {"env": {"NAME": "@"}}, {"python": "@"}, {"python": "conda:@"},
    {"python": "pyxis:@"}, {"python": "/x/@.sif"}, {"slurm": {"mem": "@", "chdir": "@", "exclude": ["@"]}},
    {"slurm": {"partition": "@", "account": "@", "qos": "@", "constraint": "@", "gres": "@", "reservation": "@"}},
    {"slurm": {"extra": ["--comment=@"]}}, {"slurm": {"extra": ["@"]}},
], ids=str)  # fmt: skip
def test_value_is_one_word_or_refused(tmp_path: Path, cluster: dict[str, Any], text: str) -> None:
    try:
        made = script(tmp_path, **_filled(cluster, text))
    except AllranksError as error:
        assert "\x1b" not in str(error)
        return
    options = [line for line in made.splitlines() if line.startswith("#SBATCH")]
    assert not any("--wrap" in line for line in options)
    assert "49" not in made.replace(str(tmp_path), "")
    (tmp_path / "job.sbatch").write_text(made)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    # the functions stand for the programs of a cluster; what remains is what the shell makes of the values
    stubs = "module() { :; }; conda() { :; }; eval() { :; }; source() { :; }; export -f module conda eval source; "
    stubs += "exec bash job.sbatch"
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
        cluster = {"launcher": "slurm", "nodes": 2, "python": image}
        spec = parse_spec({**BASE, "data": {"source": str(folder / "rows.jsonl")}, "cluster": cluster})
        options, words = agent_command(spec, make_plan(spec, machine_facts()), RunDir(tmp_path / "run"), "python")
        known = ("apptainer", "exec", "python", "/x.sif", "--nv")
        for word in (*options, *words):
            assert word in known or word.startswith(("--container-", "--bind="))


@pytest.mark.parametrize("text", [p for p in PAYLOADS if p.strip()])
def test_names_of_runs_are_refused(text: str) -> None:
    with pytest.raises(AllranksError, match="run name"):
        parse_spec({**BASE, "name": text})


@pytest.mark.parametrize(
    "text",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}"],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "form.jinja").write_text(text)
    require_template(str(tmp_path / "form.jinja"))
    with pytest.raises(DataError, match="unsafe"):
        _jinja(tmp_path / "form.jinja", mask_prompt=False)({"text": "a"}, 0)
    assert not os.path.exists("PWNED")  # noqa: PTH110


MARKUP = [
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "]]><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>', "' onmouseover='alert(1)", "javascript:alert(1)", "{{ 7*7 }}{% for x in y %}", "<!--",
    "\u202e\x1b[31m\x00",
    "<a href='javascript:alert(1)'>x</a>",
]  # fmt: skip
FORMULAS = ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1+1"]


class Watcher(HTMLParser):
    """Notes what a page could run, or fetch, or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "svg", "img", "iframe", "object"):
            self.found.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in ("href", "src") and "javascript:" in (value or "").lower()):
                self.found.append(f"{tag} {name}={value}")


def watched(html: str) -> list[str]:
    watcher = Watcher()
    watcher.feed(html)
    return watcher.found


def row(text: str) -> ComparisonRow:
    gates = Gates(parity=False, mechanism=True, equal_work=True)
    return ComparisonRow(strategy=text, gates=gates, reasons=[text], marks=[text], parity_error=None, figures=None)


@pytest.mark.parametrize("text", MARKUP)
def test_page_of_a_comparison(text: str) -> None:
    measured = {
        "model": text, "parameters": 1, "dtype": text, "world_size": 2, "nodes": 1, "device": text,
        "global_batch_size": 2, "grad_accum": 1, "repeats": 1, "steps": 1, "warmup_steps": 1,
        "negative_control": {"error": 1.0}, "ranks": [{name: {"repeats": [{}]} for name in (text, "a")}],
    }  # fmt: skip
    html = comparison_page(text, measured, [row(text)], [text])
    clean = comparison_page("a", {**measured, **dict.fromkeys(("model", "dtype", "device"), "a")}, [row("a")], ["a"])
    assert watched(html) == watched(clean) == []
    assert "default-src 'none'" in html


@pytest.mark.parametrize("text", MARKUP)
def test_page_of_a_climb(text: str) -> None:
    assert watched(smoke_report.html_page(ladder(_with(result(message=text), text)))) == []


def _with(test: records.TestResult, text: str) -> records.TestResult:
    fields = {f: text for f in ("title", "setting", "source", "hardware", "seed_hardware", "path") if hasattr(test, f)}
    return msgspec.structs.replace(test, **fields, scaled=[text], untested=[text])


@pytest.mark.parametrize("text", FORMULAS)
def test_cells_are_no_formulas(text: str) -> None:
    shown = "'" + text.replace("\r", "\n")
    assert csv_cell(text) == shown
    gates = Gates(parity=False, mechanism=True, equal_work=True)
    one = ComparisonRow(strategy=text, gates=gates, reasons=[text, "x"], marks=[], parity_error=-1.5, figures=None)
    cells = next(iter(csv.DictReader(io.StringIO(csv_text([one]), newline=""))))
    assert cells["strategy"] == shown and cells["reasons"].startswith("'")
    assert cells["parity_error"] == "-1.5"  # a number is no formula
    assert csv_cell("pytorch_ddp") == "pytorch_ddp" and csv_cell("a=b") == "a=b" and csv_cell("") == ""
