"""What a box's Slurm and its nodes are told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import config_files, processes, requirements
from allranks.lab.cluster.plan import BoxOptions, BoxPaths, BoxPlan, HiddenFolder, Machine, make_box_plan

FOLDER = BoxPaths(Path("/run/allranks/box"))


def plan(
    uid: int = 0, version: tuple[int, int] = (22, 5), python_folders: tuple[str, ...] = (), **options: Any
) -> BoxPlan:
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
def test_folders_of_a_python_in_tmp(
    monkeypatch: pytest.MonkeyPatch, package: str, prefix: str, folders: list[str]
) -> None:
    tmp = Path("/tmp")  # noqa: S108 - the nodes' own /tmp is meant
    monkeypatch.setattr(requirements, "PACKAGE_FOLDER", tmp / package)
    monkeypatch.setattr(sys, "prefix", str(tmp / prefix))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert requirements.this_machine().python_folders == tuple(str(tmp / name) for name in folders)


@pytest.mark.skipif(shutil.which("nsenter") is None, reason="no nsenter here")
def test_prefixes_with_and_without_root() -> None:
    login = processes.enter_as_user(plan(), 7, processes.LOGIN_KINDS)
    assert login[1:] == ["--target=7", "--net", "--mount", "--uts"]
    rootless = processes.enter_as_user(plan(uid=1000), 7, processes.NODE_KINDS)
    assert rootless[1:4] == ["--target=7", "--user", "--preserve-credentials"]
    assert rootless[-3:] == ["--user", "--map-user=1000", "--map-group=1000"]
    words = processes.set_environment({"A": "x y"}, cwd="/a b", clean=True)
    assert words[1:] == ["-i", "--chdir=/a b", "A=x y"]
