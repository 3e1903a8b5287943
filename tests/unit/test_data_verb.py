"""`allranks data`, and what `plan` and `run` find of small files before anything is launched."""

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.text import Text

from allranks.cli import data as data_verb
from allranks.cli.console import SafeConsole
from allranks.launch import preview
from tests.conftest import tiny_spec
from tests.warm import allranks

ROWS = [{"prompt": f"What is {i} + 1?", "response": f"It is {i + 1}."} for i in range(40)]


def verb(*words: object) -> subprocess.CompletedProcess[str]:
    return allranks(*words, kind="heavy", timeout_s=100)


def spec_file(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "spec.yaml").write_text(yaml.safe_dump(tiny_spec(folder / "rows.jsonl", folder, **sections)))
    return folder / "spec.yaml"


def test_json_has_the_rows_with_their_mask_and_the_facts(tmp_path: Path) -> None:
    rows = [*ROWS, ROWS[3], {"prompt": "x", "response": ""}, {"prompt": "long " * 90, "response": "never"}]
    spec = spec_file(tmp_path, rows, data={"eval_fraction": 0.0})
    ended = verb("data", spec, "--json", "--rows", "2")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    first = found["shown"][0]
    prompt = "<|user|>\nWhat is 0 + 1?\n<|assistant|>\n"
    assert first["segments"] == [{"text": prompt, "trained": False}, {"text": "It is 1.</s>", "trained": True}]
    assert (len(found["shown"]), first["row"], first["cut_tokens"]) == (2, 0, 0)
    facts = found["facts"]
    assert (facts["template"], facts["template_reason"]) == ("chat", "columns prompt, response")
    assert (facts["rows"], facts["rows_train"], facts["rows_empty"], facts["rows_identical"]) == (43, 42, 1, 1)
    assert (facts["rows_truncated"], facts["rows_without_target"]) == (1, 1)
    assert found["numbers"] == {"cut": [42], "dropped": [42], "identical": [40]}
    assert found["row_tokens"]["longest"] == 64
    assert (found["world_size"], found["problem"], found["columns"]) == (2, None, ["prompt", "response"])
    shown = preview.inspect_data(preview.prepare(spec), rows=100)["shown"]
    assert facts["tokens_trained"] == sum(row["tokens_trained"] for row in shown)


def test_piped_output_marks_what_is_trained_and_writes_control_characters_out(tmp_path: Path) -> None:
    rows = [{"prompt": "red \x1b[31m bell \x07 \u202e", "response": "line\nHF_TOKEN=hf_abcdefghijklmnopqrst"}, *ROWS]
    ended = verb("data", spec_file(tmp_path, rows, data={"eval_fraction": 0.0}), "--rows", "1")
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout
    assert "red \\x1b[31m bell \\x07 \\u202e" in text and "\x1b" not in text
    assert "⟦line\nHF_TOKEN=***</s>⟧" in text
    assert "*** replaces text that looks like a secret" in text
    assert "template  chat (columns prompt, response); the model has no chat template" in text


def test_a_terminal_of_80_columns_shows_trained_text_in_green(tmp_path: Path) -> None:
    run = preview.prepare(spec_file(tmp_path, ROWS))
    found = {**preview.inspect_data(run, rows=1), "secrets_hidden": False}
    out = io.StringIO()
    data_verb._show(SafeConsole(file=out, force_terminal=True, width=80, color_system="standard"), run.spec, found, 2)
    text = out.getvalue()
    assert "\x1b[32mIt is" in text and data_verb.OPEN not in text
    assert max(len(line) for line in Text.from_ansi(text).plain.splitlines()) <= 80


@pytest.mark.parametrize("word", ["data", "run"])
def test_too_few_sequences_are_refused_before_the_launch(tmp_path: Path, word: str) -> None:
    ended = verb(word, spec_file(tmp_path, ROWS[:4], data={"max_length": 512, "eval_fraction": 0.0}))
    assert ended.returncode == 2
    assert "4 training rows give 1 sequence of up to 512 tokens (data.packing: isolated), too few" in ended.stderr
    assert "set data.packing: none, which gives 4 sequences, or use fewer ranks (cluster.procs_per_" in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_plan_notes_too_few_sequences_and_the_cure_works(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, ROWS[:4], data={"max_length": 512, "eval_fraction": 0.0})
    assert "too few for 2 ranks" in verb("plan", spec).stdout
    assert "too few" not in verb("plan", spec, "--set", "data.packing=none").stdout
    assert "too few" not in verb("plan", spec, "--set", "cluster.procs_per_node=1").stdout
    ended = verb("data", spec, "--set", "cluster.procs_per_node=5", "--set", "data.packing=none")
    assert "give 4 sequences, too few for 5 ranks; use fewer ranks (cluster.procs_per_node: 4)" in ended.stderr


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": None, "data": None, "adapter": None, "script": {"path": __file__}}, "runs your own program"),
        (
            {"model": {"name": "mlp:8x2", "config": {}}, "data": {"source": "builtin:noise"},
             "adapter": {"type": "none", "targets": None}},
            "trained on noise",
        ),
        ({"data": {"template": "alpaca"}}, "there is no column 'instruction'"),
    ],
)  # fmt: skip
def test_a_spec_without_rows_or_with_wrong_ones_ends_in_2(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    ended = verb("data", spec_file(tmp_path, ROWS, **sections))
    assert (ended.returncode, words in ended.stderr, ended.stdout) == (2, True, ""), ended.stderr
