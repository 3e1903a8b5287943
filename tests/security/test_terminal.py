"""Nothing that a file, a folder's name or a log holds reaches the terminal as a command.

An escape sequence can set the title, write to the clipboard, move the cursor over what was said before, or hide text.
"""

import ast
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose import terminal as diagnosis
from allranks.cli.console import SafeConsole
from allranks.cli.logs import _follow
from allranks.cli.main import cli, main
from allranks.cli.options import json_text
from allranks.cli.run_output import summary_table
from allranks.launch import runs
from allranks.planning.planner import make_plan
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir, create_run
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from allranks.utils.text import printable
from tests.conftest import REPO, tiny_spec

ATTACKS = {
    "title": "\x1b]0;owned\x07", "clear": "\x1b[2J\x1b[H", "clipboard": "\x1b]52;c;b3duZWQ=\x1b\\",
    "eight bits": "\x9b2J\x9d0;owned\x9c", "hidden": "\x1b[8mhidden\x1b[0m", "direction": "\u202eevil\u202c",
    "back": "ok\b\bno", "return": "failed\rpassed", "bell": "\x07", "device control": "\x1bPq#0\x1b\\",
    "link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "reset": "\x1bc", "unfinished": "\x1b]0;owned",
    "line": "a\u2028b", "delete": "\x7f", "half": "\x1b",
}  # fmt: skip
ALL = "".join(ATTACKS.values())
# what no verb may print; line feeds are its own
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def shown(*words: str, colours: bool = False) -> str:
    """What a verb prints; with `colours` as on a terminal, its own colours taken out."""
    text = CliRunner().invoke(cli, list(words), env={"COLUMNS": "200"}, color=colours, standalone_mode=False).output
    return COLOURS.sub("", text) if colours else text


@pytest.mark.parametrize("name", ATTACKS)
def test_printable_leaves_text_alone(name: str) -> None:
    text = printable(f"before {ATTACKS[name]} after")
    assert not OBEYED.search(text) and text.startswith("before ") and text.endswith("fter")
    assert printable(text) == text


def test_printable_keeps_what_is_no_command() -> None:
    for text in ("plain", "two\nlines\tand a tab", "grüße 漢字 é 👍🏽", "50 % [red] <b> \\x1b"):
        assert printable(text) == text
    assert printable("failed\rpassed") == "failed passed"  # both can be read
    assert printable("\x1b[1mbold\x1b[0m\x1b[2J", styled=True) == "\x1b[1mbold\x1b[0m"


def test_a_console_strips_every_text_and_keeps_its_own_colours(capsys: pytest.CaptureFixture[str]) -> None:
    console = SafeConsole(force_terminal=True, width=300, color_system="truecolor")
    table = Table(title=ALL)
    table.add_column(Text(ALL))
    table.add_row(Text(ALL))
    console.print(table)
    console.print(Text(ALL, style="bold"), soft_wrap=True)
    console.print(ALL, markup=False)
    console.rule(Text(ALL))
    out = capsys.readouterr().out
    assert not OBEYED.search(COLOURS.sub("", out))
    assert "\x1b[1m" in out


def test_a_console_shows_names_between_colons_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("host:key:1")
    table.add_row("a:key:b")
    SafeConsole(width=100).print(table, "[bold]run:fire:2[/bold]")
    out = capsys.readouterr().out
    assert all(text in out for text in ("host:key:1", "a:key:b", "run:fire:2"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder that somebody else has prepared: hostile in its name and in every file."""
    spec = parse_spec(tiny_spec("builtin:instructions", tmp_path))
    made = create_run(tmp_path, "t")
    runs.write_request(made, spec, make_plan(spec, machine_facts()))
    log = made.log_of(1, "n1", 0)
    log.parent.mkdir()
    text = f"{ALL}\nRuntimeError: CUDA error: invalid device ordinal {ALL}\nValueError: {ALL}\n"
    log.write_text(text, encoding="utf-8")
    made.events.mkdir(exist_ok=True)
    event = {"event": "start", "time": 1.0, "rank": 0, "attempt": 1}
    error = {**event, "event": "error", "time": 2.0, "type": ALL, "message": ALL, "known": False, "echo": False}
    made.events_of(0).write_text(json.dumps(event) + "\n" + json.dumps(error) + "\n")
    hostile_values = dict.fromkeys(("message", "model", "dataset", "steps"), ALL)
    write_json(made.metrics, {"status": f"failed{ALL}[link=http://evil]x[/link]", **hostile_values})
    hostile = tmp_path / f"t{ALL}x[bold]".replace("/", "").replace("\x00", "")
    made.root.rename(hostile)
    return RunDir(hostile)


def test_logs_that_are_followed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log = run.log_of(1, "n1", 0)
    # an escape sequence does not hide it from the masking
    printed = "HF_TOKEN=hf_abcdefg\x1b[0mhijklmnop0123 api_\x07key=Xs3cr3tValue\n"
    log.write_text(log.read_text(encoding="utf-8") + printed, encoding="utf-8")
    _follow(run, 1, (), None, {})
    out = capsys.readouterr().out
    assert "invalid device ordinal" in out and "HF_TOKEN=*** api_key=***" in out and not OBEYED.search(out)


@pytest.mark.parametrize(("words", "expected"), [
    (["logs", "{root}"], "invalid device ordinal"), (["logs", "{root}", "--json"], "invalid device ordinal"),
    (["logs", "{root}", "--tail", "1"], ""), (["runs", "--run-root", "{parent}"], ""),
    (["runs", "--run-root", "{parent}", "--json"], "failed"), (["report", "{root}"], "failed"),
    (["report", "{root}", "--json"], "failed"), (["logs", "t", "--run-root", "{parent}"], ""),
    (["logs", "nothing-like-it", "--run-root", "{parent}"], ""), (["diagnose", "{root}"], "invalid_device"),
    (["diagnose", "{root}", "--json"], "invalid_device"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_verbs_on_a_hostile_run(run: RunDir, words: list[str], expected: str) -> None:
    text = shown(*(word.format(root=run.root, parent=run.root.parent) for word in words), colours="diagnose" in words)
    assert expected in text.replace("\\n", "") and not OBEYED.search(text)
    assert words != ["report", "{root}"] or "[bold]" in text.replace("\n", "")


def test_the_name_of_a_run_is_no_markup(tmp_path: Path) -> None:
    create_run(tmp_path, "a[bold]b[link=evil]c").spec.write_text("x")
    assert "a[bold]b[link=evil]c" in shown("runs", "--run-root", str(tmp_path))


def test_diagnose(run: RunDir) -> None:
    named = run.root / f"{ALL}.log".replace("/", "")
    named.write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    broken = run.root / f"{ALL}.gz".replace("/", "")
    broken.write_bytes(b"\x1f\x8b broken")
    for path, expected in ((run.root, "invalid_device"), (named, "invalid_device"), (broken, "Not read")):
        raw = CliRunner().invoke(cli, ["diagnose", str(path)], color=True, standalone_mode=False).output
        assert expected in raw and "\x1b[8m" not in raw and not OBEYED.search(COLOURS.sub("", raw))


def test_a_diagnosis_has_only_its_own_colours(tmp_path: Path) -> None:
    """Colours pass the last place: a text that hides itself must have lost its own before."""
    (tmp_path / "a.log").write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    found = diagnose([tmp_path])
    finding = msgspec.structs.replace(found.findings[0], title=ALL, cause=ALL, host=ALL)
    health = msgspec.structs.replace(found.health, hosts=[ALL])
    hostile = msgspec.structs.replace(found, findings=[finding], health=health)
    text = "\n".join(diagnosis.diagnosis_lines(hostile, 100))
    assert "hidden" in text and "\x1b[8m" not in text


def test_a_diagnosis_prints_no_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last place before the terminal lets only colours through, whatever a line holds."""
    monkeypatch.setattr(diagnosis, "diagnosis_lines", lambda found, width: [ALL])
    diagnosis.show_diagnosis(diagnose([]))
    assert not OBEYED.search(capsys.readouterr().out)


def test_a_summary_is_no_markup() -> None:
    texts = {"run_name": "[bold]x", "status": "[link=evil]y", "device": "[red]z"}
    metrics = {**texts, "model": None, "world_size": 1, "nodes": 1, "wall_time_s": 1.0}
    with (console := SafeConsole(width=100)).capture() as captured:
        console.print(summary_table(metrics))
    assert all(text in captured.get() for text in texts.values())


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """Hostile files for the verbs that read what users bring, in their names too."""
    good = tiny_spec("builtin:instructions", tmp_path)
    good["cluster"]["env"] = {"PLAIN": ALL, f"A{ALL}": "1"}
    event = {"ph": "X", "name": ALL, "ts": 1, "dur": 2, "pid": 1, "tid": 1, "cat": "cpu_op"}
    texts = {
        "script": f"#!/bin/bash\n#SBATCH --nodes={ALL}\nexport A=1 # {ALL}\n"
        f"python -m torch.distributed.launch x.py {ALL}\n",
        "topo": f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV{ALL}\t0-3\nGPU1\tNV4\t X \t0-3\n{ALL}\n",
        "bad": yaml.safe_dump({"name": ALL, "model": {"name": ALL}, ALL: 1}, allow_unicode=True),
        "broken": "a: [\x1b]0;owned\x07\n",
        "trace.json": json.dumps({"traceEvents": [event]}),
        "good": yaml.safe_dump(good, allow_unicode=True),
    }
    found = {}
    for name, text in texts.items():
        path = tmp_path / f"{ALL}{name}".replace("/", "")
        path.write_text(text)
        found[name.split(".")[0]] = str(path)
    return found


VERBS = (
    ["lint", "{script}"], ["lint", "none{all}"], ["topo", "{topo}"], ["topo", "{script}"], ["plan", "{bad}"],
    ["plan", "{broken}"], ["plan", "{good}"], ["plan", "{good}", "--set", "name={all}"], ["trace", "{trace}"],
    ["trace", "{topo}"], ["failures", "{all}"], ["diagnose", "{topo}"], ["logs", "no{all}"],
    ["plan", "{good}", "--full"], ["examples", "{all}"], ["init", "--yes", "--data", "{all}.csv", "-o", "-"],
    ["init", "--yes", "--model", "{all}", "-o", "-"],
    ["init", "--yes", "--machine", "hosts", "--hosts", "{all}", "-o", "-"], ["verb{all}"], ["plan", "--option{all}"],
    ["plan"], ["export", "{all}"], ["runs", "{all}"], ["plan", "{good}", "--set"], ["doctor", "{bad}"],
)  # fmt: skip


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_verbs_that_read_what_users_bring(
    words: list[str], inputs: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a terminal sees it, with the errors; as text, as JSON, and with colours."""
    filled = [word.format(all=ALL, **inputs) for word in words]
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["allranks", *filled, *more])
        with pytest.raises(SystemExit):
            main()
        said = capfd.readouterr()
        assert (said.out + said.err).strip() and not OBEYED.search(said.out + said.err)
    assert not OBEYED.search(shown(*filled, colours=True))


def test_json_is_json_and_safe() -> None:
    value = {ALL: [ALL, 1.5, None], "surrogate": "\ud83d", "kept": "grüße 漢字"}
    text = json_text(value)
    assert json.loads(text) == value and not OBEYED.search(text)
    assert "grüße 漢字" in text
    text.encode("utf-8")


def test_all_verbs_print_through_one_place() -> None:
    """A verb that prints by click or rich itself would let everything through."""
    allowed = {"options.py", "console.py", "completion.py"}  # completion prints click's own script
    found = []
    for path in (REPO / "src" / "allranks" / "cli").glob("*.py"):
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if call in ("click.echo", "click.secho", "print", "Console", "rich.print", "sys.stdout.write"):
                found.append(f"{path.name}:{node.lineno}: {call}")  # type: ignore[attr-defined]
    assert found == []
    assert issubclass(SafeConsole, Console)
    assert os.linesep == "\n"
