"""Secrets of a spec reach the ranks and no file; what a program prints is masked where it is shown."""

import hashlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from allranks.analysis.report.html import html_environment
from allranks.analysis.report.page import render
from allranks.analysis.report.run_data import read_run_data
from allranks.cli.main import cli
from allranks.errors import SpecError
from allranks.launch import runs
from allranks.launch.hosts import manual_steps
from allranks.planning import rank_environment
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir, create_run
from allranks.spec import parse_spec
from allranks.spec.records import ScriptSpec
from allranks.utils.machine import machine_facts
from allranks.utils.redaction import HIDDEN, redact, redact_arguments, redact_env, redact_tree
from tests.conftest import REPO
from tests.warm import allranks

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq\nshortlastline==\n-----END RSA PRIVATE KEY-----"
HEX40 = "3f1c0a9b7e5d2468ace013579bdf2468ace01357"
# name, value: what each holds must stand in no file of a run
VARIABLES = {
    "MYSQL_PWD": "pw7", "KEYBLOCK": PEM, "FIRST": "ASIAY34FZKBOKMUTVV7A",
    "SECOND": "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuv", "THIRD": JWT, "FOURTH": "xoxb-123456789012-abcdefABCDEF",
    "AUTH": "Bearer abc123def", "PASSPHRASE": "correct horse battery", "GH_PAT": "abcdef012345",
    "DATABASE": "postgres://me:pw8secret@db/x", "WANDB": HEX40, "PGPASSWORD": "elephant", "SMTP_PASS": "letmein",
    "STRIPE": "sk_live_4eC39HqLyjWDarjtT1zdp7dc", "VAULT": "hvs.CAESIJzdu8Q2nVjLwkd9G4hTTx",
    "SESSION_KEY": "q8Zr5tQ8wxA7mN2bV4cX",
}  # fmt: skip
ARGUMENTS = (
    ["--api-key", "Xs3cr3tValue"], ["--password=Xs3cr3tValue"], [JWT], ["https://user:Xs3cr3tValue@host/x"],
    ["--hf-token", "Xs3cr3tValue"], ["-u", "me:Xs3cr3tValue"], ["-H", "Authorization: Bearer Xs3cr3tValue"],
    ["--db", "mysql://me:Xs3cr3tValue@h/db"], ["secret=Xs3cr3tValue"], ['{"api_key": "Xs3cr3tValue"}'],
    ["--wandb", HEX40], [PEM], ["postgres://u:pw/Xs3cr3tValue@host/db"], ["redis://:a/b@Xs3cr3tValue@host:6379"],
    ["cluster.env.DB_PASSWORD=Xs3cr3tValue"], ["cluster.env={HF_TOKEN: Xs3cr3tValue}"],
)  # fmt: skip
SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
HARMLESS = (
    "tokens=1234", "tokens/s 123456", "num_tokens=123456", "tokenizer=AutoTokenizer", "max_token_length=4096",
    "token_type_ids: [0, 0, 1]", "TOKENIZERS_PARALLELISM=false", "pad_token_id = 128001", "eos_token: <|im_end|>",
    "eos_token=</s>", "commit 0123456789abcdef0123456789abcdef01234567",
    f"sha256: {SHA256}", f"cache_key={SHA256}", 2 * SHA256,
    "mistralai/Mistral-7B-v0.1", "/home/me/projects/training/runs/alpaca/checkpoints/step/adapters/models/base",
    "PWD=/home/me", "OLDPWD=/home/me/x", "START_PWD=/home/me", "HF_TOKEN_PATH=/home/me/token", "--password-file /etc/x",
    "KeyError: 'password'", "KeyError: 'api_key'", "token=None", "password authentication failed for user",
    "special token <|endoftext|> added", "basic training", "http://host:8080/x", "git@github.com:me/x.git",
    "tcp://host:29500/a@b", "git+https://github.com/o/r@v1:x", "key: value", "keys=['a', 'b']", "monkey=banana",
    "author=me", "Token indices sequence length is longer than the maximum", "train.lr=1e-4",
    "forward pass: 0.123456 s", "http://[::1]:29500", "--token-dropout 0.1", "passes=3", "attention_mask=None",
    "signature=(Tensor, int)", "--sort-key length", "session 3 of 4", "max_new_tokens=128",
    "loss 2.3456 grad_norm=1.234",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_secret_variables_are_hidden_whole(name: str) -> None:
    assert redact_env({name: VARIABLES[name]}) == {name: HIDDEN}


@pytest.mark.parametrize("words", ARGUMENTS, ids=lambda words: words[0][:20])
def test_secret_arguments_are_hidden(words: list[str]) -> None:
    hidden = redact_arguments(words)
    assert "Xs3cr3tValue" not in str(hidden) and JWT not in hidden and HEX40 not in hidden and "MIIE" not in str(hidden)
    assert redact_arguments(hidden) == hidden  # a driver that reads placeholders finds no new secret
    assert "Xs3cr3tValue" not in redact(" ".join(words)) and "Xs3cr3tValue" not in redact(json.dumps(words))


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_arguments(text.split()) == text.split()


def test_names_and_values_of_json_are_judged_together() -> None:
    kept = {"steps": 3, "run_name": "tiny", "weights_hash": HEX40}
    rows, note = [{"password": "x"}, "Bearer abcdef123456"], "at https://me:pw@host/x"
    hidden = redact_tree({"api_key": "abc", "rows": rows, "note": note, **kept})
    rows, note = [{"password": HIDDEN}, f"Bearer {HIDDEN}"], f"at https://{HIDDEN}@host/x"
    assert hidden == {"api_key": HIDDEN, "rows": rows, "note": note, **kept}


REPEATED = (
    "key", "key_", "--token ", '"key', "token '", "://a", "eyJ", "-----BEGIN PRIVATE KEY-----", "authorization: ", "a",
    "-",
)  # fmt: skip


@pytest.mark.parametrize("part", REPEATED)
def test_a_hostile_text_does_not_keep_the_redactor_busy(part: str) -> None:
    """Text of one repeated part takes time in proportion: 8 times the text, far less than 64 times."""
    taken = []
    for size in (20_000, 160_000):
        began = time.process_time()
        redact(part * (size // len(part)))
        taken.append(time.process_time() - began)
    assert taken[1] < 32 * max(taken[0], 0.005), part


def spec_of(tmp_path: Path, launcher: str = "local", **cluster: object) -> dict[str, Any]:
    (tmp_path / "own.py").write_text(PROGRAM)
    args = ["--lr", "0.1", *(word for some in ARGUMENTS for word in some)]
    cluster = {"launcher": launcher, "procs_per_node": 2, "env": {**VARIABLES, "PLAIN": "seen"}, **cluster}
    script = {"path": str(tmp_path / "own.py"), "args": args}
    root, observe = str(tmp_path / "runs"), {"telemetry_s": 0}
    return {"name": "own", "script": script, "run_root": root, "cluster": cluster, "observe": observe}


def written(spec: dict[str, Any]) -> RunDir:
    parsed = parse_spec(spec)
    run = create_run(parsed.run_root, parsed.name)
    runs.write_request(run, parsed, make_plan(parsed, machine_facts()))
    return run


def executed(tmp_path: Path, spec: dict[str, Any]) -> tuple[subprocess.CompletedProcess[str], RunDir]:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return verb("run", tmp_path / "spec.yaml"), RunDir(next((tmp_path / "runs").iterdir()))


def verb(*words: object) -> subprocess.CompletedProcess[str]:
    return allranks(*words, kind="heavy", timeout_s=180)


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.exception is None, done.output
    return done.output


def fragments(text: str) -> list[str]:
    return [part for part in FRAGMENTS if part in text]


PROGRAM = """
import hashlib, json, os, sys
names = json.loads(sys.argv[-1]) if sys.argv[-1].startswith("[") else []
print("ARGS", hashlib.sha256(json.dumps(sys.argv[1:]).encode()).hexdigest(), flush=True)
print("KEPT", "ALLRANKS_SCRIPT_ARGS" in os.environ, flush=True)
for name in os.environ.get("NAMES", "").split():
    print("VAR", name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
if os.environ.get("LEAK"):
    token = "hf_" + "9876543210ponmlkjihgfedcba"[::-1]  # a traceback quotes this line
    print("leaked HF_TOKEN=" + token + " \\x1b]0;owned\\x07\\x1b[2J", flush=True)
    raise ValueError("login with " + token + " failed")
"""
FRAGMENTS = (
    "Xs3cr3tValue", "MIIEpAIBAAKCAQEA7bq", "shortlastline", JWT[:60], HEX40, "pw8secret", "elephant", "letmein",
    "abc123def", "correct horse", "github_pat_11", "ASIAY34FZ", "xoxb-1234", "abcdef012345", "sk_live_4eC", "hvs.CAES",
    "q8Zr5tQ8wxA7", "'pw7'", '"pw7"', " pw7\n", "=pw7",
)  # fmt: skip


def leaks(root: Path) -> list[str]:
    texts = {path: path.read_bytes().decode(errors="replace") for path in root.rglob("*") if path.is_file()}
    return [f"{path.name}: {part}" for path, text in texts.items() for part in fragments(text)]


@pytest.mark.parametrize("launcher", ["local", "slurm", "hosts"])
def test_no_secret_is_written_before_the_start(tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("--set", "cluster.env.API_KEY=Xs3cr3tValue", "--set", f"script.args=[--x, {JWT}]")
    monkeypatch.setattr("sys.argv", ["allranks", "run", "spec.yaml", *sets])
    more = {"hosts": ["127.0.0.1"]} if launcher == "hosts" else {}
    variables = {k: v for k, v in VARIABLES.items() if launcher != "slurm" or "\n" not in v}
    run = written(spec_of(tmp_path, launcher, **more, env={**variables, "PLAIN": "seen"}))
    assert leaks(run.root) == [] and fragments(render(read_run_data(run))) == []
    assert "seen" in run.plan.read_text() and "0.1" in run.spec.read_text()
    kept = yaml.safe_load(run.spec.read_text())["script"]["args"]
    assert kept[:3] == ["--lr", "0.1", "--api-key"] and kept[3] == HIDDEN


def test_a_report_of_an_older_run_hides_what_its_spec_holds(tmp_path: Path) -> None:
    run = create_run(tmp_path, "old")
    run.spec.write_text(yaml.safe_dump(spec_of(tmp_path)))
    assert fragments(render(read_run_data(run))) == []


def test_plan_shows_no_secret_and_hosts_are_told_to_export_secret_arguments(tmp_path: Path) -> None:
    path, spec = tmp_path / "spec.yaml", spec_of(tmp_path, "hosts", hosts=["127.0.0.1"])
    path.write_text(yaml.safe_dump(spec))
    said = "\n".join(manual_steps(parse_spec(spec), make_plan(parse_spec(spec), machine_facts())))
    assert f"export {rank_environment.SCRIPT_ARGS}=" in said and "JSON list" in said
    assert fragments(said + shown("plan", str(path)) + shown("plan", str(path), "--json")) == []


def test_ranks_get_the_real_arguments_and_variables(tmp_path: Path) -> None:
    """What the program gets is what was asked for, and no file of the run holds it."""
    spec = spec_of(tmp_path)
    spec["cluster"]["env"]["NAMES"] = " ".join(VARIABLES)
    done, run = executed(tmp_path, spec)
    assert done.returncode == 0, done.stdout + done.stderr
    args = hashlib.sha256(json.dumps(spec["script"]["args"]).encode()).hexdigest()
    for log in run.rank_logs(1).values():
        lines = [line.split() for line in log.read_text().splitlines()]
        assert ["ARGS", args] in lines and ["KEPT", "False"] in lines
        digests = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in VARIABLES.items()}
        assert {line[1]: line[2] for line in lines if line[0] == "VAR"} == digests
    assert leaks(run.root) == []
    assert run.report.exists() and HIDDEN in run.report.read_text()


def test_what_a_program_prints_is_masked_where_it_is_shown(tmp_path: Path) -> None:
    """In message, events, metrics, page, diagnosis, and by logs; the log itself is the program's."""
    spec = spec_of(tmp_path, env={"LEAK": "1"})
    spec["script"]["args"] = []
    done, run = executed(tmp_path, spec)
    assert done.returncode == 1
    printed = "abcdefghijklmnop0123456789"
    raw = [log.read_text() for log in run.rank_logs(1).values()]
    assert any(printed in text for text in raw), "the first rank to fail may end the other before it prints"
    answers = {"run": done, **{name: verb(name, run.root) for name in ("logs", "diagnose", "report")}}
    answers |= {"json": verb("logs", run.root, "--json"), "tail": verb("logs", run.root, "--tail", "3")}
    for name, answer in answers.items():
        said = answer.stdout + answer.stderr
        assert printed not in said and "\x1b" not in said and "\x07" not in said, name
        assert "login with ***" in said or name == "tail", name
    files = [p for p in run.root.rglob("*") if p.is_file() and not p.name.endswith(".log")]
    assert [p.name for p in files if printed.encode() in p.read_bytes()] == []


def test_lint_quotes_a_line_without_its_secrets(tmp_path: Path) -> None:
    token, key = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567", "0123456789abcdef0123456789abcdef01234567"
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
        f"srun --export=HF_TOKEN={token} torchrun --nproc_per_node=8 --nnodes=2 train.py --api-key {key}\n"
    )
    for more in ([], ["--json"]):
        said = shown("lint", str(script), *more)
        assert "srun --export=HF_TOKEN=***" in said and "export-drops-environment" in said
        assert token not in said and key not in said


@pytest.mark.parametrize("form", ["hf_[", "ghp_", "AKIA", "PRIVATE KEY"])
def test_no_other_module_recognises_secrets(form: str) -> None:
    package = REPO / "src" / "allranks"
    found = {str(p.relative_to(package)) for p in package.rglob("*.py") if form in p.read_text("utf-8")}
    assert found <= {"utils/redaction.py"}


def test_a_private_key_of_many_lines_is_masked_in_logs(tmp_path: Path) -> None:
    run = create_run(tmp_path, "own")
    run.spec.write_text("x")
    log = run.log_of(1, "n1", 0)
    log.parent.mkdir()
    body = "\n".join(f"MIIEpAIBAAKCAQEA7bq{i:02}" for i in range(20))
    log.write_text(f"before\n-----BEGIN PRIVATE KEY-----\n{body}\nQk==\n-----END PRIVATE KEY-----\nafter\n")
    for tail in ("0", "5", "40"):
        for more in ([], ["--json"]):
            said = shown("logs", str(run.root), "--tail", tail, *more)
            assert "MIIE" not in said and "Qk==" not in said and "after" in said


def test_a_saved_spec_does_not_run_with_its_placeholders_and_agents_read_the_plan(tmp_path: Path) -> None:
    """Agents take nothing from the plan that is a placeholder."""
    run = written(spec_of(tmp_path))
    refused = CliRunner().invoke(cli, ["plan", str(run.spec)], standalone_mode=False).exception
    assert isinstance(refused, SpecError)
    assert "script.args[3]" in str(refused) and rank_environment.SCRIPT_ARGS in str(refused)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    assert rank_environment.SCRIPT_ARGS in {item.name for item in plan.environment}
    assert not {rank_environment.SCRIPT_ARGS, *VARIABLES} & rank_environment.as_variables(plan.environment).keys()


def test_script_arguments_come_from_the_environment_only_for_placeholders() -> None:
    real = ["--api-key", "abc", "x"]
    saved = ScriptSpec(path="x", args=redact_arguments(real))
    assert saved.args == ["--api-key", HIDDEN, "x"]
    assert rank_environment.script_arguments(saved, {rank_environment.SCRIPT_ARGS: json.dumps(real)}) == real
    own = ScriptSpec(path="x", args=["--lr", "1"])
    assert rank_environment.script_arguments(own, {rank_environment.SCRIPT_ARGS: json.dumps(real)}) == ["--lr", "1"]
    for bad in ("", "x", "{}", '["a"]', "[1, 2, 3]"):
        with pytest.raises(SpecError):
            rank_environment.script_arguments(saved, {rank_environment.SCRIPT_ARGS: bad})


def test_a_secret_in_a_shell_line_is_warned_of(tmp_path: Path) -> None:
    spec = parse_spec(spec_of(tmp_path, setup=["export MYSQL_PWD=Xs3cr3tValue", "module purge"]))
    found = [w for w in make_plan(spec, machine_facts()).warnings if "cluster.setup" in w]
    assert "Xs3cr3tValue" not in "".join(found)
    assert [w for w in found if "MYSQL_PWD" in w and "cluster.env" in w]


def test_pages_hide_what_a_record_brings() -> None:
    """The pages of comparisons and smoke tests: every text passes one place."""
    template = html_environment().from_string("{{ text }}|{{ text | upper }}")
    page = template.render(text="password=Xs3cr3tValue \x1b[2J\x9b2J")
    assert "3cr3t" not in page.lower() and "\x1b" not in page and "\x9b" not in page
