"""Failures 21 to 40 that need neither ranks nor nodes; those that need GPUs are replayed from their output."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.cli.run import _detach
from allranks.launch import runs
from allranks.launch.launchers import get_launcher
from allranks.launch.preview import PreparedRun
from allranks.launch.slurm.launcher import _sbatch_export
from allranks.launch.slurm.script import render_batch_script
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from tests.golden.test_sbatch import spec_with
from tests.unit.test_diagnose_judge import STATUS, watchdog
from tests.unit.test_plan import facts


def found_in(tmp_path: Path, *lines: str) -> Diagnosis:
    (tmp_path / "job.out").write_text("\n".join(lines) + "\n")
    return diagnose([tmp_path / "job.out"])


INIT = [
    *(f"n1:70{r}:70{r} [{r}] NCCL INFO Bootstrap : Using ib0:10.2.0.1<0>" for r in (0, 1)),
    *(
        f"n1:70{r}:71{r} [{r}] NCCL INFO Channel 0{c} : {r}[{r}] -> {1 - r}[{1 - r}] [send] via NET/IB/0"
        for r in (0, 1)
        for c in (0, 1)
    ),
    *((
        f"n1:70{r}:71{r} [{r}] NCCL INFO ncclCommInitRank comm 0x5{r} rank {r} nranks 2 cudaDev {r} busId {r + 1}000 - "
        "Init COMPLETE"
    ) for r in (0, 1)),
]  # fmt: skip


def timeouts(seq: int) -> list[str]:
    status = [STATUS.format(rank=r, second=6, seq=seq, done=seq - 1) for r in (0, 1)]
    return [line for r in (0, 1) for line in (watchdog(r, seq=seq), status[r])]


def test_a_first_collective_that_times_out_after_init_complete(tmp_path: Path) -> None:
    """InfiniBand between GPUs of one node: the communicator is made over sockets, and the first data never arrive."""
    found = found_in(tmp_path, *INIT, *timeouts(1))
    first = found.findings[0]
    assert first.id == "first_collective_failed"
    assert found.health.communicators_ready == 2
    assert any("within one node goes over the network" in text for text in found.health.advice)
    assert "doctor --collectives" in first.next_test


def test_a_later_timeout_after_init_complete_is_not_called_the_first(tmp_path: Path) -> None:
    found = found_in(tmp_path, *INIT, "step 40/100 loss 2.10", *timeouts(812))
    assert [f.id for f in found.findings] == ["collective_hang"]


def test_a_file_system_that_went_away_in_its_several_words(tmp_path: Path) -> None:
    for words in ("Stale file handle", "Stale NFS file handle", "Cannot send after transport endpoint shutdown"):
        found = found_in(tmp_path, f"[rank3]: OSError: {words}: '/scratch/me/ckpt/step-40'")
        assert [(f.id, f.rank) for f in found.findings] == [("stale_file_handle", 3)], words


def test_harmless_lines_of_a_good_run(tmp_path: Path) -> None:
    """As pynvml, DeepSpeed's launcher and NCCL's end leave them: replayed, since they take a GPU or an old package."""
    found = found_in(
        tmp_path,
        (
            "torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py "
            "instead."
        ),
        (
            "[WARNING] [runner.py:215:fetch_hostfile] Unable to find hostfile, will proceed with training with local "
            "resources only."
        ),
        "step 1/2 loss 2.10",
        "step 2/2 loss 2.01",
        "n1:700:700 [0] NCCL INFO comm 0x50 rank 0 nranks 2 cudaDev 0 busId 1000 - Abort COMPLETE",
    )
    assert found.findings == []
    assert {b.id for b in found.benign} == {"deprecation_warning", "deepspeed_hostfile", "nccl_abort_complete"}
    assert all(b.why for b in found.benign)
    lost = "Some weights of {} were not initialized from the model checkpoint at /out and are newly initialized: ['x']"
    benign = found_in(tmp_path, lost.format("BertForSequenceClassification")).benign
    assert [b.id for b in benign] == ["uninitialised_head"]
    assert not found_in(tmp_path, lost.format("LlamaForCausalLM")).benign, "that is a checkpoint with a part missing"


@pytest.mark.parametrize(
    ("names", "extra", "outside", "wanted"),
    [
        (["HF_TOKEN"], [], {}, {}),
        (["HF_TOKEN"], [], {"SBATCH_EXPORT": "ALL,A=1"}, {}),
        ([], [], {"SBATCH_EXPORT": "NONE"}, {}),
        (["HF_TOKEN", "B_KEY"], [], {"SBATCH_EXPORT": "NONE"}, {"SBATCH_EXPORT": "HF_TOKEN,B_KEY"}),
        (["HF_TOKEN"], ["--nice", "--export=NONE"], {}, {"SBATCH_EXPORT": "HF_TOKEN"}),
        (["HF_TOKEN"], [], {"SBATCH_EXPORT": "EDITOR"}, {"SBATCH_EXPORT": "EDITOR,HF_TOKEN"}),
    ],
)
def test_secrets_are_handed_on_by_name_where_the_callers_environment_is_not(
    names: list[str], extra: list[str], outside: dict[str, str], wanted: dict[str, str]
) -> None:
    assert _sbatch_export(names, extra, outside) == wanted


STANDS_FOR_SLURM = """#!/bin/sh
[ "${{0##*/}}" != sbatch ] || env > {there}/environment
echo '7;is UP'
"""


@pytest.mark.parametrize("site", ["ALL", "NONE"])
def test_sbatch_is_given_the_secrets_that_its_script_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    """Programs in the place of Slurm's commands write down their environment; the box tries the real ones."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "scontrol"):
        (tmp_path / "bin" / name).write_text(STANDS_FOR_SLURM.format(there=tmp_path))
        (tmp_path / "bin" / name).chmod(0o755)
    secrets = {"HF_TOKEN": "hf_secret0123456789", "DB_PASSWORD": "it's two words"}
    for name in (*secrets, "A"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)  # so that it is taken out again after the test
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_EXPORT", site)
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    spec = spec_with(env={**secrets, "A": "seen"})
    run, plan = RunDir(tmp_path / "run"), make_plan(spec, facts())
    run.logs.mkdir(parents=True)
    run.sbatch.write_text(render_batch_script(spec, plan, run, "/usr/bin/python3"))
    get_launcher("slurm").start(run, spec, plan, 1, {})
    given = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
    assert {name: given.get(name) for name in secrets} == secrets
    assert sorted(given["SBATCH_EXPORT"].split(",")) == (["ALL"] if site == "ALL" else ["DB_PASSWORD", "HF_TOKEN"])
    script = run.sbatch.read_text()
    assert "export A=seen" in script
    assert not any(secret in script for secret in secrets.values())


def test_a_background_run_gets_secrets_not_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its follower, which is not started here, reads the spec from the run folder."""
    env = {"HF_TOKEN": "hf_secret0123456789", "HTTPS_PROXY": "http://me:pw@proxy:3128", "A": "seen"}
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "x.json"}, "cluster": {"env": env}})
    run, plan, given = RunDir(tmp_path / "run"), make_plan(spec, facts()), {}
    run.logs.mkdir(parents=True)
    runs.write_request(run, spec, plan)
    for name in env:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("allranks.cli.run.subprocess.Popen", lambda command, **how: given.update(how["env"]))
    _detach(run, plan, PreparedRun(spec), as_json=True)
    assert all(given.get(name) == env[name] for name in ("HF_TOKEN", "HTTPS_PROXY"))
    files = "".join(path.read_text() for path in run.root.rglob("*") if path.is_file())
    assert "seen" in files and "hf_secret" not in files and "me:pw" not in files


def test_commands_for_people_say_what_they_cannot_hold(tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_secret0123456789", "A": "^lo,docker0"}
    hosts = ["10.0.0.1", "10.0.0.2"]
    spec = spec_with(launcher="hosts", hosts=hosts, env=env, modules=["cuda/12.4"], setup=["ulimit -n 65536"])
    RunDir(tmp_path).logs_of(1).mkdir(parents=True)
    job = get_launcher("hosts").start(RunDir(tmp_path), spec, make_plan(spec, facts()), 1, {})
    try:
        said = job.news() or ""
    finally:
        job.kill()
        assert job.poll() == 1  # no node has joined; the control channel is closed
    assert not RunDir(tmp_path).channel(1).exists()
    before = [line.split(":  ")[1] for line in said.splitlines() if line.startswith("  before, on each node:")]
    first = "export HF_TOKEN=...  (a secret, not contained in the commands)"
    assert before == [first, "module load cuda/12.4", "ulimit -n 65536"]
    assert said.count("A='^lo,docker0'") == 2
    assert "hf_secret" not in said


def the_batch_script(
    run: RunDir, modules: list[str], env: dict[str, str], setup: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Bash really runs it; in the driver's place stands a program that prints the environment."""
    spec = spec_with(modules=modules, setup=list(setup))
    run.logs.mkdir(parents=True, exist_ok=True)
    text = render_batch_script(spec, make_plan(spec, facts()), run, "/usr/bin/printenv")
    text = text.replace("-m allranks.launch.driver " + str(run.root), "HERE")
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=20)


def test_a_node_without_a_module_system_is_told_apart(tmp_path: Path) -> None:
    nowhere = {"MODULESHOME": str(tmp_path), "LMOD_PKG": str(tmp_path)}
    if any(Path(f"/etc/profile.d/{name}.sh").exists() for name in ("lmod", "modules")):
        pytest.skip("this machine has a module system")
    done = the_batch_script(RunDir(tmp_path), ["cuda/12.1"], nowhere)
    assert done.returncode == 3
    verdict: Any = read_json(RunDir(tmp_path).logs / "driver.json")
    assert (verdict["state"], verdict["exit_code"]) == ("failed", 3)
    assert "no `module` command" in verdict["message"] and verdict["message"] in done.stdout


@pytest.mark.parametrize(
    ("setup", "code", "said"),
    [
        (["export HERE=1", "if true; then", '  ls "/no such\\dir"', "fi"], 2, 'ls "/no such\\dir"'),
        (["source /nowhere/env.sh"], 1, "source /nowhere/env.sh"),
        (["exit 7"], 7, "exit 7"),
    ],
)
def test_a_line_of_setup_that_fails_is_named(tmp_path: Path, setup: list[str], code: int, said: str) -> None:
    done = the_batch_script(RunDir(tmp_path), [], {}, setup)
    assert done.returncode == 3, done.stderr
    verdict: Any = read_json(RunDir(tmp_path).logs / "driver.json")
    assert verdict["message"] == f"cluster.setup: `{said}` ended with exit code {code} on the job's first node"


def test_modules_in_the_wrong_order_are_refused_by_a_real_module_system(tmp_path: Path) -> None:
    """`anaconda` can be seen only once `external` is loaded; neither is a function of the shell at first."""
    home = Path(os.environ.get("MODULESHOME", "/usr/share/modules"))
    if not (home / "init" / "bash").is_file():
        pytest.skip("no Environment Modules here: apt-get install environment-modules, or set MODULESHOME")
    (tmp_path / "all" / "external").mkdir(parents=True)
    (tmp_path / "more" / "anaconda").mkdir(parents=True)
    (tmp_path / "all" / "external" / "1").write_text(f"#%Module\nprepend-path MODULEPATH {tmp_path}/more\n")
    (tmp_path / "more" / "anaconda" / "2024").write_text("#%Module\nsetenv HERE loaded\n")
    env = {"MODULESHOME": str(home), "LMOD_PKG": str(tmp_path), "MODULEPATH": str(tmp_path / "all")}
    done = the_batch_script(RunDir(tmp_path / "a"), ["anaconda", "external"], env)
    verdict: Any = read_json(RunDir(tmp_path / "a").logs / "driver.json")
    assert done.returncode == 3 and "`module load anaconda` failed" in verdict["message"], done.stderr
    (tmp_path / "job.out").write_text(done.stdout + done.stderr)
    assert diagnose([tmp_path / "job.out"]).findings[0].id == "library_missing"
    done = the_batch_script(RunDir(tmp_path / "b"), ["external", "anaconda"], env)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded"), done.stderr
    done = the_batch_script(RunDir(tmp_path / "c"), ["external", "nosuch/3"], env)
    assert done.returncode == 3
    assert "`module load nosuch/3` failed on the job's first node, after external" in done.stdout
