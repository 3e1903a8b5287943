"""Finding a box, and what the command line says where there is none or where it cannot be."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from allranks.cli.cluster import cluster, per_node
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import box as boxes
from allranks.lab.cluster import config_files, processes, requirements
from allranks.lab.cluster.faults import bits_per_s
from allranks.lab.cluster.plan import BoxOptions, BoxPaths, BoxPlan, HiddenFolder, Machine, make_box_plan
from allranks.lab.cluster.processes import check_output, last_lines, run_command
from allranks.nodes.slurm import endpoints


@pytest.fixture(autouse=True)
def empty_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(endpoints, "state_root", lambda: tmp_path / "state")
    monkeypatch.delenv(endpoints.NAME_VARIABLE, raising=False)
    yield tmp_path / "state"


def test_there_is_no_box_and_the_error_says_how_to_get_one(empty_root: Path) -> None:
    assert boxes.find_box() is None and boxes.find_box("other") is None and boxes.list_boxes() == []
    with pytest.raises(EnvironmentNotAble, match="allranks cluster up"):
        boxes.need_box()
    (empty_root / "half").mkdir(parents=True)
    (empty_root / "half" / "plan.json").write_text("{")
    assert boxes.find_box() is None
    assert boxes.default_name() == "half"
    with pytest.raises(RequestError, match="--name"):
        boxes.find_box("../etc")


def test_the_box_that_the_environment_names_is_started_and_missed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoints.NAME_VARIABLE, "mine")
    assert cluster.commands["up"].make_context("up", []).params["name"] == "mine"
    with pytest.raises(EnvironmentNotAble, match="No box named 'mine' is running"):
        boxes.need_box()


def test_status_without_a_box_is_one_document_and_exit_1() -> None:
    done = CliRunner().invoke(cluster, ["status", "--json"])
    assert done.exit_code == 1
    assert msgspec.json.decode(done.stdout)["up"] is False
    assert "allranks cluster up" in CliRunner().invoke(cluster, ["status"]).stderr


def test_per_node_values() -> None:
    assert per_node("--cpus", ("4", "n2=8"), int) == {"": 4, "n2": 8}
    assert per_node("--interface", ("n2=eno1",), str) == {"n2": "eno1"}
    with pytest.raises(RequestError, match="n2=8"):
        per_node("--cpus", ("n2=many",), int)


def test_missing_programs_name_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(requirements, "SYSTEM_PATH", "/nowhere")
    with pytest.raises(EnvironmentNotAble) as raised:
        requirements.check_requirements(accounting=True)
    for word in ("slurmctld", "munge", "mariadb-server", "scripts/install-slurm.sh", "apt-get install"):
        assert word in str(raised.value)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("allranks.lab.cluster", {"torch", "jinja2", "rich", "click"}),
        ("allranks.cli.cluster", {"torch", "numpy", "yaml", "psutil", "jinja2", "rich"}),
    ],
)
def test_importing_is_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_box_is_chosen_as_slurms_clients_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    up = [SimpleNamespace(name="a")]
    monkeypatch.setattr(boxes, "list_boxes", lambda: up)
    assert boxes.find_box() is up[0]
    up.append(SimpleNamespace(name="b"))
    with pytest.raises(RequestError, match=r"a, b.*--name.*ALLRANKS_BOX"):
        boxes.find_box()
    up.append(SimpleNamespace(name="box"))
    assert boxes.find_box() is up[2]


def test_a_failed_command_becomes_one_sentence() -> None:
    with pytest.raises(Exception, match="the thing ended with exit code 3: because / of this"):
        check_output(["sh", "-c", "printf 'first\\nbecause\\n\\nof this\\n' >&2; exit 3"], what="the thing")
    with pytest.raises(Exception, match="did not end within"):
        run_command(["sleep", "5"], timeout_s=0.1)
    with pytest.raises(EnvironmentNotAble, match="not installed"):
        run_command(["no-such-program"])
    assert last_lines(" \n") == "no output"


def test_rates() -> None:
    assert (bits_per_s("10mbit"), bits_per_s("1.5gbit")) == (10_000_000, 1_500_000_000)
    for wrong in ("10", "0mbit", "-1mbit", "10 mbit", "10MB"):
        with pytest.raises(RequestError, match="--rate"):
            bits_per_s(wrong)


FOLDER = BoxPaths(Path("/run/allranks/box"))


def plan(uid: int = 0, version: Any = (22, 5), python_folders: tuple[str, ...] = (), **options: Any) -> BoxPlan:
    return make_box_plan(
        BoxOptions(**options),
        folder=str(FOLDER.path),
        network=IPv4Network("10.77.0.0/24"),
        machine=Machine("root" if uid == 0 else "ada", uid, uid, 2, 16000, python_folders),
        slurm_version=version,
    )


def conf(made: BoxPlan) -> dict[str, str]:
    lines = config_files.slurm_conf(made, FOLDER).splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith(("NodeName", "PartitionName")))


def test_a_users_line_replaces_ours_whatever_its_case() -> None:
    text = config_files.slurm_conf(plan(conf=("killwait = 30", "Prolog=/x")), FOLDER)
    assert "KillWait=5" not in text
    assert text.endswith("killwait = 30\nProlog=/x\n")


def test_accounting_is_enforced() -> None:
    settings = conf(plan(accounting=True, gpus={"": 1}))
    assert settings["AccountingStorageEnforce"] == "associations,limits,qos"
    assert settings["AccountingStorageTRES"] == "gres/gpu"
    assert "StoragePass=secret\n" in config_files.slurmdbd_conf(plan(), FOLDER, "secret")


def test_cgroups_are_left_alone_in_old_and_new_slurm() -> None:
    assert config_files.cgroup_conf(plan()) == "CgroupPlugin=cgroup/v1\n"
    assert config_files.cgroup_conf(plan(version=(24, 11))) == "CgroupPlugin=disabled\n"


def test_nsswitch_keeps_users_and_groups_but_asks_no_name_server() -> None:
    text = config_files.nsswitch_conf("passwd: files systemd\nhosts:  files mdns4_minimal dns\ngroup: files\n")
    assert text == "passwd: files systemd\ngroup: files\nhosts: files\n"


def test_enter_scripts_quote_hostile_paths_and_are_valid_shell() -> None:
    made = plan(hidden=(HiddenFolder("/data/a b; echo $(foo)", ("n1",)),))
    text = config_files.enter_script(made, FOLDER, "n1")
    assert "hidden '/data/a b; echo $(foo)'" in text
    assert "tmp /tmp" in text and "tmp /tmp" not in config_files.enter_script(plan(shared_tmp=True), FOLDER, "n1")
    assert "hidden" not in config_files.enter_script(made, FOLDER, "n2")
    for name in ("login", "n1"):
        script = config_files.enter_script(made, FOLDER, name)
        subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=10)


def test_a_private_tmp_keeps_the_folders_of_a_python_in_tmp() -> None:
    made = plan(python_folders=("/tmp/a b/venv",))  # noqa: S108
    lines = config_files.enter_script(made, FOLDER, "n1").splitlines()
    own = next(n for n, line in enumerate(lines) if line.endswith("tmp /tmp"))
    before, after = (n for n, line in enumerate(lines) if line.startswith("mount --bind") and "'/tmp/a b/venv'" in line)
    assert before < own < after
    shared = plan(python_folders=("/tmp/venv",), shared_tmp=True)  # noqa: S108
    assert "venv" not in config_files.enter_script(shared, FOLDER, "n1")


@pytest.mark.parametrize(
    ("package", "prefix", "folders"),
    [
        ("clone/src/allranks", "clone/.venv", ["clone"]),
        ("venv/lib/python3/site-packages/allranks", "venv", ["venv"]),
        ("src/allranks", "/usr", ["src"]),  # never all of /tmp
        ("/home/ada/clone/src/allranks", "/usr", []),
    ],
)
def test_a_python_in_tmp(monkeypatch: pytest.MonkeyPatch, package: str, prefix: str, folders: list[str]) -> None:
    tmp = Path("/tmp")  # noqa: S108 - the nodes' own /tmp is meant
    monkeypatch.setattr(requirements, "PACKAGE_FOLDER", tmp / package)
    monkeypatch.setattr(sys, "prefix", str(tmp / prefix))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert requirements.this_machine().python_folders == tuple(str(tmp / name) for name in folders)


@pytest.mark.skipif(shutil.which("nsenter") is None, reason="no nsenter here")
def test_prefixes_with_and_without_root() -> None:
    assert processes.enter_as_user(plan(), 7, processes.LOGIN_KINDS)[1:] == ["--target=7", "--net", "--mount", "--uts"]
    rootless = processes.enter_as_user(plan(uid=1000), 7, processes.NODE_KINDS)
    assert rootless[1:4] == ["--target=7", "--user", "--preserve-credentials"]
    assert rootless[-3:] == ["--user", "--map-user=1000", "--map-group=1000"]
    assert processes.set_environment({"A": "x y"}, cwd="/a b", clean=True)[1:] == ["-i", "--chdir=/a b", "A=x y"]
