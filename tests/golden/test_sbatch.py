"""The batch script: equal to the records beside this test, and safe whatever the spec holds.

plain.sbatch and everything.sbatch are whole; of other scripts the records hold what differs from one of these.
After a wanted change: ``ALLRANKS_GOLDEN=write python -m pytest tests/golden``, then read the difference.
"""

import json
import os
import shlex
import subprocess
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import SpecError
from allranks.lab.smoke import TESTS
from allranks.lab.smoke.records import PlaceName
from allranks.lab.smoke.runner import SmokeOptions, prepare_test
from allranks.launch.launchers import agent_command
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec, parse_spec, spec_to_dict
from allranks.spec.records import ModelSpec
from allranks.utils.machine import MachineFacts
from tests.conftest import REPO
from tests.unit.test_plan import facts

HERE = Path(__file__).parent
HOSTILE = ["a'; touch pwned", 'b"; touch pwned; "', "$(touch pwned)", "`touch pwned`", "x y", "a,b=c", "*", "~", "#no"]
HOSTILE += ["back\\slash"]


def spec_with(**cluster: Any) -> Any:
    base = {"launcher": "slurm", "nodes": 2, "procs_per_node": 8}
    raw = {"name": "job", "model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    return parse_spec({**raw, "cluster": base | cluster})


def text_of(**cluster: Any) -> str:
    spec = spec_with(**cluster)
    return render_batch_script(spec, make_plan(spec, facts()), RunDir(Path("/shared/runs/job-1")), "/env/bin/python")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "slurm": {
            "partition": "gpu", "account": "lab", "qos": "high", "time": "01:00:00", "gpus_per_node": 8,
            "cpus_per_task": 64, "mem": "0", "exclusive": True, "constraint": "h100", "reservation": "demo",
            "chdir": "/shared", "exclude": ["n3", "n7"], "extra": ["--mail-type=END", "--nice"],
        },
        "modules": ["cuda/12.4", "nccl"], "setup": ["ulimit -n 65536"], "env": {"NCCL_DEBUG": "INFO"},
        "python": "/shared/venv", "rendezvous": {"interface": "eth0"}, "cache": "/shared/hf",
    },
    "gres-conda": {"slurm": {"gres": "gpu:8"}, "python": "conda:train"},
    "apptainer": {"python": "/shared/image.sif"},
    "pyxis": {"python": "pyxis:nvcr.io/nvidia/pytorch:24.10-py3"},
}  # fmt: skip


WHOLE = ("plain", "everything")


def changes(text: str, base: str) -> list[str]:
    """Each line that the base lacks, behind the slice of the base's lines which the line and its neighbours replace."""
    before, now = base.splitlines(), text.splitlines()
    found = []
    for kind, low, high, begin, end in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind != "equal":
            found += [f"{low}:{high} {line}" for line in now[begin:end] or ["nothing"]]
    return found


def check_record(name: str, sections: dict[str, list[str]]) -> None:
    text = "".join(f"== {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items())
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        (HERE / name).write_text(text)
    assert text == (HERE / name).read_text(), "ALLRANKS_GOLDEN=write writes it anew"


@pytest.mark.parametrize("name", WHOLE)
def test_script_is_the_golden_one(name: str) -> None:
    text = text_of(**CASES[name])
    if os.environ.get("ALLRANKS_GOLDEN") == "write":
        (HERE / f"{name}.sbatch").write_text(text)
    assert text == (HERE / f"{name}.sbatch").read_text()


def test_other_scripts_differ_from_the_golden_one_as_recorded() -> None:
    """Those of the examples: frozen/plans.json."""
    plain = (HERE / "plain.sbatch").read_text()
    check_record("sbatch.txt", {name: changes(text_of(**CASES[name]), plain) for name in CASES if name not in WHOLE})


def test_agents_run_inside_of_containers_and_the_driver_does_not() -> None:
    run, image = RunDir(Path("/shared/runs/job-1")), "/shared/image.sif"
    for environment, options, words in (
        (None, [], ["/env/bin/python"]),
        ("conda:train", [], ["python"]),
        (image, [], ["apptainer", "exec", "--bind=/shared/runs/job-1", "--bind=/shared/hf", image, "python"]),
        (
            "pyxis:repo/torch:1",
            [
                "--container-image=repo/torch:1",
                "--container-mounts=/shared/runs/job-1:/shared/runs/job-1,/shared/hf:/shared/hf",
            ],
            ["python"],
        ),
    ):
        spec = spec_with(python=environment, cache="/shared/hf")
        assert agent_command(spec, make_plan(spec, facts()), run, "/env/bin/python") == (options, words)
    spec = spec_with(python=image, slurm={"gpus_per_node": 8})
    assert "--nv" in agent_command(spec, make_plan(spec, facts()), run, "/env/bin/python")[1]
    here = Path(__file__).parent
    named = msgspec.structs.replace(spec_with(python=image), model=ModelSpec(name=str(here)))
    words = agent_command(named, make_plan(named, facts()), run, "/env/bin/python")[1]
    assert f"--bind={here}" in words, "a model's folder is seen inside, too"
    for environment in (image, "pyxis:repo/torch:1"):
        assert text_of(python=environment).rstrip().splitlines()[-1].startswith("exec /env/bin/python -m")


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_are_only_values(value: str, tmp_path: Path) -> None:
    """The script is really run by bash, with the driver replaced by a program that prints what reached it."""
    text = text_of(env={"HOSTILE": value}, modules=[value], slurm={"account": value, "extra": [f"--comment={value}"]})
    body = f'module() {{ echo "module: $2"; }}\n{text}'.replace("exec /env/bin/python", "exec env python3")
    prints = "-c 'import os; print(os.environ[\"HOSTILE\"])'"
    body = body.replace("-m allranks.launch.driver /shared/runs/job-1", prints)
    done = subprocess.run(["bash", "-c", body], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    begun, *said = done.stdout.splitlines()
    assert begun.startswith("allranks ") and said == [f"module: {value}", value], done.stderr
    assert list(tmp_path.iterdir()) == []
    line = next(x for x in text.splitlines() if x.startswith("#SBATCH --account="))
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--account={value}"]


@pytest.mark.parametrize("cluster", [
    {"env": {"X": "a\nb"}}, {"env": {"X": "a\x07b"}}, {"modules": ["a\x7fb"]}, {"env": {"X; touch y": "1"}},
    {"modules": ["a\nb"]}, {"slurm": {"account": "a\n#SBATCH --exclusive"}}, {"slurm": {"extra": ["touch x"]}},
    {"slurm": {"extra": ["--comment=a\nb"]}}, {"python": "a\nb"},
])  # fmt: skip
def test_what_no_quoting_can_hold_is_refused(cluster: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        text_of(**cluster)


def test_a_job_that_may_not_go_back_to_the_queue_says_so() -> None:
    assert "#SBATCH --no-requeue\n" in text_of(slurm={"max_requeues": 0})
    assert "#SBATCH --requeue\n" in text_of(slurm={"max_requeues": 1})


def test_env_is_exported_in_the_script_and_secrets_are_not() -> None:
    text = text_of(env={"LIST": "^lo,docker0", "HF_TOKEN": "***"})
    assert "export LIST='^lo,docker0'" in text
    assert "--export" not in text
    assert "HF_TOKEN" not in text
    assert "verysecret" not in text_of(env={"HF_TOKEN": "verysecret"})


SEEDS = REPO / "examples" / "seeds"


def test_the_lab_asks_for_as_many_nodes_as_it_is_told_and_leaves_out_the_bad_one() -> None:
    spec = load_spec(SEEDS / "003" / "lab.yaml", ("cluster.nodes=10", "cluster.slurm.exclude=[hpc42]"))
    plan = make_plan(spec, facts())
    assert plan.world_size == 20 and plan.nodes[9].ranks == [18, 19]
    text = render_batch_script(spec, plan, RunDir(Path("/shared/runs/lab-1")), "/env/bin/python")
    assert "#SBATCH --nodes=10\n" in text and "#SBATCH --exclude=hpc42\n" in text


PLACES: dict[str, tuple[PlaceName, MachineFacts, tuple[str, ...]]] = {
    "slurm": ("slurm", facts(), ("cluster.slurm.partition=gpu", "cluster.slurm.account=lab")),
    "cluster": ("cluster", facts(), ()),
    "local": ("local", facts(), ()),
    "two GPUs": ("local", facts(gpus=2), ()),
}


def test_what_a_dry_run_shows() -> None:
    """Each test's scaled sentences, what its spec sets, its ranks, and how its script differs from the one before."""
    shown: dict[str, list[str]] = {}
    seen: dict[tuple[str, ...], str] = {}
    for name, (place, machine, sets) in PLACES.items():
        base = (HERE / "plain.sbatch").read_text()
        for test in TESTS:
            ready = prepare_test(test, SmokeOptions(place=place, sets=sets, run_root="/shared/runs"), machine)
            if ready.spec is None:
                shown[f"{name} {test.name}"] = [f"not run: {ready.unable}"]
                continue
            lines = [f"differs from the reference: {line}" for line in ready.scaled]
            lines.append(f"ranks: {ready.placement.world if ready.placement else 0}")
            sections = {name: spec_to_dict(ready.spec)[name] for name in ("model", "strategy", "train")}
            texts = [f"{k}: {json.dumps({k: v for k, v in s.items() if v is not None})}" for k, s in sections.items()]
            first = seen.setdefault((test.name, *texts), name)
            lines += texts if first == name else []  # those of the first place
            if place != "local":
                run = RunDir(Path(f"/shared/runs/{ready.spec.name}-1"))
                script = render_batch_script(ready.spec, make_plan(ready.spec, machine), run, "/env/bin/python")
                script = script.replace(ready.spec.name, "job")
                lines += changes(script, base)
                base = script
            shown[f"{name} {test.name}"] = lines
    check_record("smoke.txt", shown)
