"""`allranks init`: options, questions in a real terminal, refusals; each key that it writes or proposes is valid."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.launch import preview
from allranks.spec.examples import StarterChoices, starter_text
from allranks.spec.loader import parse_spec, parse_yaml
from tests.conftest import REPO
from tests.warm import allranks

CHOICES = [
    StarterChoices(model="tiny:llama", data="builtin:instructions", launcher="local", strategy="pytorch_ddp"),
    StarterChoices(model="tiny:bert", data="builtin:news", launcher="local", strategy="zero2"),
    StarterChoices(model="mlp:64x2", data="builtin:noise", launcher="local", strategy="single", procs_per_node=1),
    StarterChoices(model="m", data="d", launcher="hosts", strategy="zero1", hosts=("n1", "10.0.0.2"), nodes=2),
    StarterChoices(
        model="mistralai/Mistral-7B-v0.1", data="yahma/alpaca-cleaned", launcher="slurm", strategy="pytorch_zero3",
        nodes=2, partition="gpu", gpus_per_node=8, time="1:30:00", account="a b",
    ),
    StarterChoices(model="tiny:llama", data="builtin:instructions", launcher="slurm", strategy="zero3"),
]  # fmt: skip


def init(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return allranks("init", *words, cwd=cwd, kind="heavy")


def answer(cwd: Path, answers: list[str], *words: str, limit_s: float = 60) -> tuple[int, str]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        env = {**os.environ, "PYTHONPATH": str(REPO / "src")}
        os.execve(sys.executable, [sys.executable, "-m", "allranks", "init", *words], env)  # noqa: S606
    out, left, end = b"", list(answers), time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            ready, _, _ = select.select([terminal], [], [], 0.2)
            if ready:
                try:
                    block = os.read(terminal, 65536)
                except OSError:
                    break
                if not block:
                    break
                out += block
            elif left and out.endswith(b": "):
                os.write(terminal, left.pop(0).encode())
                out += b"\n"
        else:
            os.kill(pid, 9)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert not left, out.decode()
    return os.waitstatus_to_exitcode(status), out.decode()


@pytest.mark.parametrize("choices", CHOICES, ids=lambda c: f"{c.launcher}-{c.model}")
def test_the_spec_says_what_was_chosen_and_each_proposed_key_is_valid(choices: StarterChoices) -> None:
    text = starter_text(choices, "my.yaml")
    spec = parse_spec(parse_yaml(text, "my.yaml"))
    assert spec.model is not None and spec.data is not None
    assert (spec.model.name, spec.data.source, spec.strategy.name) == (choices.model, choices.data, choices.strategy)
    cluster = {"launcher": choices.launcher, "nodes": choices.nodes, "hosts": [*choices.hosts]}
    assert {key: getattr(spec.cluster, key) for key in cluster} == cluster
    for key in ("partition", "gpus_per_node", "time", "account"):
        assert getattr(spec.cluster.slurm, key) == getattr(choices, key)
    lines = text.splitlines()
    assert all("#" in line for line in lines if re.match(r" *[a-z_]+: .", line)), "every key has its comment"
    proposed = [i for i, line in enumerate(lines) if re.match(r" *# [a-z_]+: ", line)]
    assert len(proposed) >= 5
    for i in proposed:  # one at a time
        parse_spec(parse_yaml("\n".join([*lines[:i], lines[i].replace("# ", "", 1), *lines[i + 1 :]]), "my.yaml"))


@pytest.mark.parametrize("name", ["x: y", "#x", "1:30", "yes", "-", "it's", 'a"b', "a\nb", "[a]", "null", "😀"])
def test_names_are_quoted_where_yaml_would_read_something_else(name: str) -> None:
    choices = StarterChoices(model=name, data=name, launcher="hosts", strategy="zero1", hosts=(name,))
    spec = parse_spec(parse_yaml(starter_text(choices, f"{name}.yaml"), "x"))
    assert spec.model is not None and spec.data is not None
    assert (spec.model.name, spec.data.source, spec.cluster.hosts) == (name, name, [name])


REFUSED = [
    ([], "give --model, --data, --machine, or --yes"),
    (["--model", "tiny:llama", "--data", "builtin:instructions"], "give --machine, or --yes"),
    (["--yes", "--data", "nofile.jsonl"], "data.source nofile.jsonl: there is no such file"),
    (["--yes", "--data", "odd.csv"], "init takes them as --columns ROLE=COLUMN,..., or --template FILE"),
    (["--yes", "--data", "odd.csv", "--columns", "text"], "--columns text: expected ROLE=COLUMN"),
    (["--yes", "--model", "tiny:lama"], "did you mean tiny:llama?"),
    (["--yes", "--strategy", "ddp"], "did you mean 'pytorch_ddp'?"),
    (["--yes", "--machine", "hosts"], "--hosts is missing"),
    (["--yes", "--machine", "slurm", "--hosts", "a"], "--hosts: only with --machine hosts"),
    (["--yes", "--machine", "slurm", "--time", "1h"], "--time 1h: expected a time limit of Slurm"),
    (["--yes", "--output", "nowhere/x.yaml"], "the folder nowhere does not exist"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_are_those_of_plan_and_nothing_is_written(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("x,y\n1,2\n")
    done = init(tmp_path, *words)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["odd.csv"]


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    mine = tmp_path / "spec.yaml"
    mine.write_text("mine")
    done = init(tmp_path, "--yes")
    assert done.returncode == 2 and "spec.yaml exists" in done.stderr and mine.read_text() == "mine"
    assert init(tmp_path, "--yes", "--force").returncode == 0 and "tiny:llama" in mine.read_text()


def test_output_as_json_and_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 4)
    done = init(tmp_path, "--yes", "--data", "train.jsonl", "--json", "-o", "my.yaml")
    assert done.returncode == 0 and not done.stderr
    document = json.loads(done.stdout)
    wanted = {"file": "my.yaml", "launcher": "local", "model": "tiny:llama"}
    wanted |= {"data_found": "jsonl file of 144 B, columns instruction, output"}
    assert document.items() >= {**wanted, "text": (tmp_path / "my.yaml").read_text()}.items()
    done = init(tmp_path, "--yes", "-o", "-")
    assert parse_spec(parse_yaml(done.stdout, "x")).name == "llama-instructions"
    document = json.loads(init(tmp_path, "--yes", "-o", "-", "--json").stdout)
    assert (document["file"], document["text"]) == (None, done.stdout)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.yaml", "train.jsonl"]


def test_questions_in_a_terminal_and_wrong_answers(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 4)
    code, said = answer(tmp_path, ["\n", "trian.jsonl\n", "train.jsonl\n", "desk\n", "laptop\n", "fsdp\n", "zero2\n"])
    assert code == 0, said
    assert "did you mean train.jsonl?" in said and "jsonl file of 144 B, columns instruction, output" in said
    assert "'desk' is not one of" in said and "did you mean 'pytorch_zero3'" in said
    spec = preview.read_spec(tmp_path / "spec.yaml")
    assert spec.model is not None and spec.data is not None
    assert (spec.model.name, spec.data.source, spec.strategy.name) == ("tiny:llama", "train.jsonl", "zero2")


def test_questions_on_slurm_and_a_model_that_the_check_refuses(tmp_path: Path) -> None:
    given = ["--data", "builtin:instructions", "--partition", "gpu"]
    answers = ["tiny:lama\n", "tiny:llama\n", "slurm\n", "\n", "4\n", "1h\n", "1:00:00\n", "2\n"]
    code, said = answer(tmp_path, answers, *given)
    assert code == 0, said
    assert "did you mean tiny:llama?" in said and "--time 1h: expected" in said
    cluster = preview.read_spec(tmp_path / "spec.yaml").cluster
    assert (cluster.nodes, cluster.slurm.gpus_per_node, cluster.slurm.time) == (2, 4, "1:00:00")
    assert said.count("Model:") == 2 and said.count("Machine") == 1 and "Partition" not in said


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["ctrl-c", "ctrl-d"])
def test_an_interruption_leaves_nothing(tmp_path: Path, key: str) -> None:
    code, said = answer(tmp_path, ["\n", key])
    assert code == 1 and "allranks: interrupted" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_it_asks_which_column_is_what_where_no_template_fits(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"nr": i, "frage": f"Wo ist {i}?", "antwort": f"Da {i}."}) + "\n" for i in range(90))
    (tmp_path / "rows.jsonl").write_text(rows)
    roles = ["prompt=frge,response=antwort\n", "prompt=frage,response=antwort\n"]
    code, out = answer(tmp_path, ["tiny:llama\n", "rows.jsonl\n", *roles, "laptop\n", "\n"])
    assert code == 0, out
    said = " ".join(out.split())
    assert "there is no column 'frge'" in said and "did you mean 'frage'" in said
    assert out.count("Roles of the columns") == 2
    spec = preview.read_spec(tmp_path / "spec.yaml")
    assert spec.data is not None and spec.data.columns == {"prompt": "frage", "response": "antwort"}


def test_what_it_writes_for_own_rows_is_what_data_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"prompt": "a", "response": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 4)
    assert init(tmp_path, "--yes", "--data", "rows.jsonl").returncode == 0
    spec = preview.read_spec(tmp_path / "spec.yaml")
    assert spec.data is not None and (spec.data.packing, spec.train.epochs, spec.train.max_steps) == ("none", 1, None)
    assert preview.sequence_problem(preview.prepare(spec)) is None
    for name, text, problem in (
        ("one.jsonl", row, "1 training row gives 1 sequence, too few for 2 ranks"),
        ("odd.jsonl", row * 40 + '{"prompt": "a", "response": {"b": 1}}\n', "row 40, column 'response': expected text"),
        ("labels.csv", "text,label\n" + "a b,c\n" * 9, "classification needs an encoder"),
    ):
        (tmp_path / name).write_text(text)
        done = init(tmp_path, "--yes", "--data", name, "-o", "other.yaml")
        assert done.returncode == 2 and problem in done.stderr, done.stderr
    assert not (tmp_path / "other.yaml").exists()
