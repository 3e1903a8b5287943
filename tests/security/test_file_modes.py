"""A run's folder is for its owner alone unless it is shared; what lies elsewhere keeps the user's umask."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from allranks.launch import runs
from allranks.launch.export import _publish as publish_export
from allranks.planning.planner import make_plan
from allranks.rundir.events import EventLog
from allranks.rundir.files import make_folder, open_append, write_json, write_text_atomic
from allranks.rundir.paths import RunDir, create_run, find_run, restrict_permissions
from allranks.spec import parse_spec
from allranks.train import profiler
from allranks.train.checkpoint.commit import publish_checkpoint
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec
from tests.dist.harness import until
from tests.other_users import OTHER_USER, needs_other_user, open_up, other_python, run_as
from tests.warm import Forked, start_verb

GROUP = 65003


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def too_open(root: Path, bits: int = 0o077) -> dict[str, str]:
    """What others may use, by path."""
    return {str(path.relative_to(root)): oct(mode(path)) for path in [root, *root.rglob("*")] if mode(path) & bits}


def start(spec: dict[str, object], folder: Path) -> tuple[Forked | subprocess.Popen[bytes], Path]:
    """A run in new interpreters, with the umask of this process; and what it prints."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return start_verb(["run", str(path)], folder / "said", anew=True), folder / "said"


def test_what_the_package_writes_is_for_the_owner(tmp_path: Path) -> None:
    """Each kind of writer by itself, before anything restricts the folder's files afterwards."""
    cluster = {"launcher": "slurm", "procs_per_node": 1}
    spec = parse_spec({**tiny_spec("builtin:instructions", tmp_path), "cluster": cluster})
    run = create_run(tmp_path / "runs", "t")
    runs.write_request(run, spec, make_plan(spec, machine_facts()))
    EventLog(run.events_of(0), 0).close()
    write_json(run.metrics, {})
    write_text_atomic(run.report, "x")
    os.close(open_append(run.log_of(1, "n1", 0)))
    profiler.publish_trace(lambda path: Path(path).write_text("{}"), run.trace_of(0))
    make_folder(run.checkpoint(3) / "state")
    assert too_open(run.root) == {}
    assert {run.spec, run.plan, run.sbatch, run.logs / "slurm.log", run.trace_of(0)} <= set(run.root.rglob("*"))
    assert mode(run.root) == 0o700 and mode(run.spec) == 0o600


def test_a_file_is_no_more_open_than_its_folder_and_the_umask(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir(0o755)
    private.mkdir(0o700)
    for folder, umask, wanted in ((shared, 0o022, 0o644), (shared, 0o077, 0o600), (private, 0o022, 0o600)):
        os.umask(umask)
        path = folder / f"{umask:o}.json"
        write_json(path, {})
        assert mode(path) == wanted


def test_group_readable_and_a_setgid_root_share_with_the_group(tmp_path: Path) -> None:
    setgid = tmp_path / "team"
    setgid.mkdir()
    setgid.chmod(0o2770)
    for run in (create_run(tmp_path, "t", group_readable=True), create_run(setgid, "t")):
        write_json(run.metrics, {})
        (run.root / "by-another-library").mkdir(0o700)
        other = run.root / "by-another-library" / "file"
        other.touch(0o600)
        restrict_permissions(run)
        assert too_open(run.root, 0o007) == {}
        assert mode(run.root) & 0o777 == 0o750 and mode(run.metrics) == 0o640
        assert mode(other) == 0o640 and mode(other.parent) & 0o777 == 0o750
    assert create_run(setgid, "u").root.stat().st_mode & stat.S_ISGID


def test_seal_restricts_what_others_wrote_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch(0o644)
    run = create_run(tmp_path, "t")
    (run.logs / "sub").mkdir(0o755)
    (run.logs / "sub" / "tool.log").touch(0o666)
    (run.logs / "link").symlink_to(outside)
    restrict_permissions(run)
    assert mode(run.logs / "sub") == 0o700 and mode(run.logs / "sub" / "tool.log") == 0o600
    assert mode(outside) == 0o644


def test_a_checkpoint_is_closed_when_it_is_published(tmp_path: Path) -> None:
    """Not only at the end of the run: torch and safetensors write with the process's umask."""
    run = create_run(tmp_path, "t")
    aside = run.checkpoints / ".step-1.tmp"
    (aside / "state").mkdir(0o755, parents=True)
    (aside / "state" / "rank0.pt").touch(0o644)
    publish_checkpoint(run, aside, 1)
    assert (run.checkpoint(1) / "state" / "rank0.pt").exists() and too_open(run.root) == {}
    assert run.latest_checkpoint.read_text() == "step-1\n"


def test_a_run_of_an_older_version_stays_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "old-1"
    (root / "logs").mkdir(parents=True)
    (root / "spec.yaml").write_text("name: old\n")
    run = find_run("old-1", tmp_path)
    write_json(run.metrics, {})
    EventLog(run.events_of(0), 0).close()
    restrict_permissions(run)
    assert mode(root) == 0o755
    assert {mode(path) for path in (run.spec, run.metrics, run.events_of(0))} == {0o644}


def test_an_export_can_be_passed_on(tmp_path: Path) -> None:
    """Copied from a checkpoint of mode 0600, it gets what the umask leaves."""
    for umask, of_file, of_folder in ((0o022, 0o644, 0o755), (0o027, 0o640, 0o750)):
        os.umask(umask)
        aside, target = tmp_path / "aside", tmp_path / f"out{umask}"
        aside.mkdir(0o700)
        (aside / "model.safetensors").touch(0o600)
        publish_export(aside, target)
        assert mode(target / "model.safetensors") == of_file and mode(target) == of_folder


PROGRAM = """
import os, sys, time
open(os.environ["OWN"] + os.environ["RANK"], "w").close()
open(os.environ["OWN"] + ".umask", "w").write(oct(os.umask(0)))
while not os.path.exists(os.environ["OWN"] + ".go"):
    time.sleep(0.05)
"""


@needs_other_user
def test_another_user_reads_nothing_of_a_run(tmp_path: Path) -> None:
    """While it runs and afterwards: its files, and the environment of its processes, which holds the secrets."""
    (tmp_path / "own.py").write_text(PROGRAM)
    open_up(tmp_path)
    own, env = str(tmp_path / "own"), {"HF_TOKEN": "hf_abcdefghijklmnop"}
    script = {"path": str(tmp_path / "own.py"), "args": ["--api-key", "Xs3cr3tValue"]}
    cluster = {"procs_per_node": 2, "env": {**env, "OWN": own}}
    spec = {"name": "t", "script": script, "run_root": str(tmp_path / "runs"), "cluster": cluster}
    spec["observe"] = {"telemetry_s": 0.1}
    process, said = start(spec, tmp_path)
    try:
        until(lambda: (Path(f"{own}0").exists() and Path(f"{own}1").exists()) or process.poll() is not None)
        (root,) = (tmp_path / "runs").iterdir()
        run = RunDir(root)
        assert_closed(run)
        assert run_as(OTHER_USER, ["ls", str(root.parent)]).stdout  # it gets as far as the run root
        exposed = run_as(OTHER_USER, [other_python(), "-c", ENVIRONMENTS]).stdout
        assert exposed.startswith("looked at")
        assert "Xs3cr3tValue" not in exposed and "hf_abcdefghijklmnop" not in exposed
    finally:
        Path(f"{own}.go").touch()
        code = process.wait(90)
    assert code == 0, said.read_text()
    assert too_open(root) == {}
    assert_closed(run)
    assert mode(Path(f"{own}0")) == 0o644 and Path(f"{own}.umask").read_text() == "0o22"  # the user's own program


ENVIRONMENTS = """
import glob
found, texts = 0, []
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    found += 1
    try:
        texts.append(open(path, errors="replace").read())
    except OSError:
        pass
print("looked at", found, texts)
"""
READ = """
import os, sys
for folder, _, names in os.walk(sys.argv[1], onerror=lambda error: print("refused", error.filename)):
    sys.argv += [os.path.join(folder, name) for name in names]
for path in sys.argv[2:]:
    try:
        print("read", path, len(open(path, "rb").read()))
    except OSError:
        print("refused", path)
"""


def assert_closed(run: RunDir) -> None:
    """Another user reads none of the files, by listing the folder or by name."""
    files = [str(path) for path in run.root.rglob("*") if path.is_file()]
    assert len(files) > 5
    answer = run_as(OTHER_USER, [other_python(), "-c", READ, str(run.root), *files])
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert len(lines) > len(files) and not [line for line in lines if line.startswith("read")]


@needs_other_user
def test_the_group_reads_a_shared_run_and_others_do_not(tmp_path: Path) -> None:
    open_up(tmp_path)
    run = create_run(tmp_path / "runs", "t", group_readable=True)
    write_json(run.metrics, {"status": "done"})
    for path in [run.root, *run.root.rglob("*")]:
        os.chown(path, -1, GROUP)
    assert "done" in run_as(OTHER_USER, ["cat", str(run.metrics)], gid=GROUP).stdout
    assert run_as(OTHER_USER, ["cat", str(run.metrics)]).returncode != 0


def test_a_training_run_leaves_nothing_open_and_its_cache_shared(tmp_path: Path) -> None:
    """With checkpoints, model, telemetry and traces, which other libraries write."""
    spec = tiny_spec("builtin:instructions", tmp_path)
    spec |= {"checkpoint": {"mode": "full"}, "run_root": str(tmp_path / "runs")}
    spec["cluster"] = {**spec.get("cluster", {}), "cache": str(tmp_path / "cache")}
    spec["observe"] = {"profile": {"wait": 1, "warmup": 1, "active": 1}, "telemetry_s": 0.1}
    process, said = start(spec, tmp_path)
    assert process.wait(240) == 0, said.read_text()
    (root,) = (tmp_path / "runs").glob("*-2*")
    run = RunDir(root)
    assert too_open(root) == {}
    assert run.checkpoint_steps() and run.traced_ranks()
    cached = [path for path in (tmp_path / "cache" / "allranks").rglob("*") if path.is_file()]
    assert cached and all(mode(path) & 0o044 == 0o044 for path in cached)
    assert not (tmp_path / "cache" / f"allranks-{os.getuid()}").exists(), "nothing of a run is another user's risk"
