"""What users and their programs rely on is what it was at f7fa6041: plans, keys, exit codes, signatures, options, old
run folders, diagnoses.

Additions are allowed; what is removed, renamed or different fails. The records are in frozen/. After a wanted change of
one of them ``ALLRANKS_GOLDEN=write python -m pytest tests/golden/test_frozen.py -k NAME`` writes it anew (not the
folders of runs); read the difference.
"""

import hashlib
import inspect
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import allranks
from allranks import errors
from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.lint.rules import RULES
from allranks.cli.main import VERBS, cli
from allranks.lab.cluster.box import BoxStatus
from allranks.launch import preview
from allranks.launch.export import ExportResult
from allranks.rundir.paths import RunDir
from allranks.spec.launchers import LAUNCHERS
from allranks.spec.strategies import REGISTRY
from allranks.spec.validation import settable_keys
from allranks.utils.machine import cpu_model, host_name
from tests.conftest import REPO, shared
from tests.unit.test_plan import facts
from tests.unit.topo_texts import SEED_L4
from tests.unit.trace_builder import kernel, launch, mark, nccl, step, write_ranks

FROZEN = Path(__file__).parent / "frozen"
WRITE = os.environ.get("ALLRANKS_GOLDEN") == "write"
EXAMPLES = sorted(str(p.relative_to(REPO / "examples").with_suffix("")) for p in (REPO / "examples").rglob("*.yaml"))
PLANNED = [name for name in EXAMPLES if not name.startswith("clusters/")]

RECORDS = {"cluster status": BoxStatus, "export": ExportResult}
"""What verbs print that take long, or need Slurm."""
TIMED = ("machine_load", "cpu_load")
"""What is recorded only where other programs load the machine."""


def lost(before: Any, now: Any, place: str = "") -> list[str]:
    """Return where `now` lacks or changes what `before` has; keys that were added are no loss."""
    if isinstance(before, dict) and isinstance(now, dict):
        absent = [f"{place}: {key} is gone" for key in before if key not in now]
        return absent + [x for key in before if key in now for x in lost(before[key], now[key], f"{place}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [x for i, (a, b) in enumerate(zip(before, now, strict=True)) for x in lost(a, b, f"{place}[{i}]")]
    return [] if before == now else [f"{place}: {before!r} is now {now!r}"]


def check(name: str, now: dict[str, Any]) -> None:
    """Compare with the record of this name, or write what differs."""
    path = FROZEN / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    problems = lost(before, now)
    if WRITE and (problems or not before):
        lines = [f"{json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in now.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        assert not problems, "\n".join(problems[:20])


def key_tree(value: Any) -> Any:
    """Return the keys of a document, of a list those of all its items; keys that are numbers or hosts are one."""
    pairs = [("[]", x) for x in value] if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    tree: dict[str, Any] = {}
    for key, item in pairs:
        kind = "N" if key.isdigit() else "HOST" if key == host_name() else key
        merge(tree.setdefault(kind, {}), {} if key in TIMED else key_tree(item))
    return tree


def merge(tree: dict[str, Any], more: dict[str, Any]) -> None:
    for key, item in more.items():
        merge(tree.setdefault(key, {}), item)


def verb(*words: str | Path) -> tuple[int, Any]:
    """Run a verb with --json in this process; return its exit code and its document."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json"], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value, json.loads(done.stdout)


def without_machine(value: Any, folder: Path) -> Any:
    """Return a document without this machine's paths; texts of several lines become lists, which show differences."""
    text = json.dumps(value).replace(str(folder), "/cwd").replace(sys.executable, "/python").replace(str(REPO), "/repo")
    return _lines(json.loads(text))


def _lines(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lines(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_lines(item) for item in value]
    return value.splitlines() if isinstance(value, str) and "\n" in value else value


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on a machine with eight cores, and eight GPUs for specs that need them."""
    monkeypatch.setattr(preview, "planning_facts", lambda spec: facts(gpus=8 if spec.cluster.device == "cuda" else 0))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plans_and_batch_scripts_of_the_examples(machine: Path) -> None:
    documents = {name: verb("plan", REPO / "examples" / f"{name}.yaml")[1] for name in PLANNED}
    check("plans", without_machine(documents, machine))


def test_verbs_options_exit_codes_names_and_signatures() -> None:
    def options(command: click.Command) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            found[names[-1] if isinstance(parameter, click.Option) else parameter.name or ""] = {x: {} for x in names}
        children = command.commands if isinstance(command, click.Group) else {}
        return found | {child: options(children[child]) for child in children}

    context = click.Context(cli)
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.AllranksError)]
    functions = {name: getattr(allranks, name) for name in allranks.__all__ if not name.startswith("_")}
    paths = {n: p for n, p in vars(RunDir).items() if isinstance(p, property) and n not in ("name", "root")}
    check(
        "surface",
        {
            "verbs": {name: options(cli.get_command(context, name) or pytest.fail(name)) for name in VERBS},
            "exit_codes": {e.__name__: e.exit_code for e in kinds},
            "api": {
                name: {
                    p.name: f"{p.kind.name}, {'required' if p.default is p.empty else f'default {p.default!r}'}"
                    for p in inspect.signature(function).parameters.values()
                }
                for name, function in functions.items()
            },
            "spec": {key: dict.fromkeys(map(str, choices), True) for key, choices in settable_keys().items()},
            "strategies": dict.fromkeys(REGISTRY, True),
            "launchers": dict.fromkeys(LAUNCHERS, True),
            "failure_classes": dict.fromkeys(CATALOGUE, True),
            "lint_rules": dict.fromkeys(RULES, True),  # what each finds: tests/lint/cases.tsv
            "run_folder": {name: str(p.fget(RunDir(Path("RUN")))) for name, p in paths.items() if p.fget},
        },
    )


def test_keys_of_json_output(machine: Path) -> None:
    """Of verbs that need no torch; those of runs are in `test_an_old_run_resumes`."""
    script, log = machine / "job.sbatch", machine / "slurm-1.out"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\nexport MASTER_ADDR=localhost\nsrun torchrun train.py\n")
    log.write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (machine / "topology.txt").write_text(SEED_L4)
    spec, traces = REPO / "examples" / "demo.yaml", machine / "traces"
    spans = [step(1, 0, 1000), mark("allranks.forward", 0, 900), launch(1, 5), kernel("gemm", 10, 500, 1)]
    write_ranks(traces, *[[*spans, launch(2, 600), nccl("allreduce", 610, 900, 1, 2)]] * 2, backend="nccl")
    commands: dict[str, tuple[str | Path, ...]] = {
        "init": ("init", "--yes"),
        "examples": ("examples",),
        "examples NAME": ("examples", "demo"),
        "lint": ("lint", script),
        "diagnose": ("diagnose", log),
        "failures": ("failures",),
        "topo": ("topo", machine / "topology.txt"),
        "trace": ("trace", traces),
        "smoke --dry-run": ("smoke", "01", "--dry-run"),
        "run --dry-run": ("run", spec, "--dry-run"),
    }
    found = {name: key_tree(verb(*words)[1]) for name, words in commands.items()}
    found |= {name: dict.fromkeys(kind.__struct_fields__, True) for name, kind in RECORDS.items()}
    check("json_keys", found)


def test_diagnosis_of_labelled_logs() -> None:
    logs = sorted(shared("logs").glob("*.log"))
    check("logs", {p.name: [finding.id for finding in diagnose([p], workers=1).findings] for p in logs})


RUNS = sorted(path.name.removesuffix(".tar.xz") for path in (FROZEN / "runs").glob("*.tar.xz"))
"""Folders of runs of two steps on two ranks, each with its full checkpoint."""


@pytest.mark.dist
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_resumes(name: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise where torch and the processor are those of the record, else to rounding.

    Processors of the same name may have AVX-512 or not; the record was made without.
    """
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    from tests.dist.harness import allranks as command

    with tarfile.open(FROZEN / "runs" / f"{name}.tar.xz") as packed:
        packed.extractall(machine / "runs", filter="data")
    done = command("resume", name, "--set", "train.max_steps=4", "--json", cwd=machine)
    assert done.returncode == 0, done.stderr
    run = RunDir(machine / "runs" / name)
    events = [json.loads(line) for line in run.events_of(0).read_text().splitlines()]
    second = events[[i for i, e in enumerate(events) if e["event"] == "start"][1] :]
    tree: dict[str, Any] = {}
    for event in (e for e in second if e["event"] not in TIMED):
        merge(tree.setdefault(event["event"], {}), key_tree(event))
    keys = {"resume": key_tree(json.loads(done.stdout)), "metrics": key_tree(json.loads(run.metrics.read_text()))}
    keys |= {word: key_tree(verb(word)[1]) for word in ("runs", "report", *(["doctor"] if name == "zero1-mlp" else []))}
    keys["diagnose"] = key_tree(verb("diagnose", run.root)[1])
    files = sorted(str(p.relative_to(run.root)) for p in run.checkpoint(4).rglob("*") if p.is_file())
    keys |= {"checkpoint": dict.fromkeys(files, True), "events": tree}
    check(f"runs/{name}", keys)
    import torch
    from safetensors.torch import load_file

    weights = [load_file(p) for p in sorted(run.checkpoint(4).glob("*.safetensors"))]
    content = b"".join(t[k].contiguous().numpy().tobytes() for t in weights for k in sorted(t))
    digest = hashlib.sha256(content).hexdigest()
    losses = [event["loss"] for event in second if event["event"] == "step"]
    exact = {"torch": torch.__version__, "cpu": cpu_model(), "losses": losses, "weights": digest}
    path = FROZEN / "runs" / f"{name}.result.json"
    if WRITE:
        check(f"runs/{name}.result", exact)
    before = json.loads(path.read_text())
    assert losses == pytest.approx(before["losses"], rel=1e-4)
    if (before["torch"], before["cpu"]) == (exact["torch"], exact["cpu"]):
        assert exact == before
