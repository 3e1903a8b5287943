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


def test_slurm_conf_is_what_was_verified_to_work_in_namespaces() -> None:
    settings = conf(plan())
    assert settings["SlurmctldHost"] == "login(10.77.0.1)"
    assert settings["ProctrackType"] == "proctrack/linuxproc"
    assert settings["SlurmdParameters"] == "config_overrides"
    assert settings["AuthInfo"] == "socket=/run/allranks/box/munge/socket,cred_expire=5"
    assert "GresTypes" not in settings and "AccountingStorageType" not in settings


def test_nodes_and_partitions() -> None:
    text = config_files.slurm_conf(plan(nodes=2, cpus={"": 4, "n2": 8}, gpus={"n2": 2}, partitions=("a", "b")), FOLDER)
    assert "NodeName=n1 NodeAddr=10.77.0.11 CPUs=4 RealMemory=8000 State=UNKNOWN" in text
    assert "NodeName=n2 NodeAddr=10.77.0.12 CPUs=8 RealMemory=8000 Gres=gpu:2 State=UNKNOWN" in text
    assert "PartitionName=a Nodes=ALL Default=YES" in text and "DefMemPerCPU=1000" in text
    assert "PartitionName=b Nodes=ALL Default=NO" in text


def test_a_users_line_replaces_ours_whatever_its_case() -> None:
    text = config_files.slurm_conf(plan(conf=("killwait = 30", "Prolog=/x")), FOLDER)
    assert "KillWait=5" not in text
    assert text.endswith("killwait = 30\nProlog=/x\n")


def test_every_path_of_the_conf_is_the_boxs_own() -> None:
    allowed = (str(FOLDER.path), "/bin/true")
    for key, value in conf(plan(accounting=True, gpus={"": 1})).items():
        for part in value.replace("socket=", "").split(","):
            assert not part.startswith("/") or part.startswith(allowed), f"{key}={value}"


def test_accounting_is_enforced() -> None:
    settings = conf(plan(accounting=True, gpus={"": 1}))
    assert settings["AccountingStorageEnforce"] == "associations,limits,qos"
    assert settings["AccountingStorageTRES"] == "gres/gpu"
    assert "StoragePass=secret\n" in config_files.slurmdbd_conf(plan(), FOLDER, "secret")


def test_gpus_are_numbered_devices() -> None:
    lines = config_files.gres_conf(plan(nodes=2, gpus={"n2": 2}), FOLDER).splitlines()
    assert lines == [f"NodeName=n2 Name=gpu File=/run/allranks/box/etc/gpu{number}" for number in (0, 1)]


def test_cgroups_are_left_alone_in_old_and_new_slurm() -> None:
    assert config_files.cgroup_conf(plan()) == "CgroupPlugin=cgroup/v1\n"
    assert config_files.cgroup_conf(plan(version=(24, 11))) == "CgroupPlugin=disabled\n"


def test_hosts_with_and_without_the_loopback_mistake() -> None:
    right = config_files.hosts(plan(nodes=2), "n2").splitlines()
    assert right[2:] == ["10.77.0.1 login", "10.77.0.11 n1", "10.77.0.12 n2"]
    wrong = config_files.hosts(plan(nodes=2), "n2", self_loopback=True).splitlines()
    assert wrong[2:] == ["10.77.0.1 login", "10.77.0.11 n1", "127.0.1.1 n2"]


def test_nsswitch_keeps_users_and_groups_but_asks_no_name_server() -> None:
    text = config_files.nsswitch_conf("passwd: files systemd\nhosts:  files mdns4_minimal dns\ngroup: files\n")
    assert text == "passwd: files systemd\ngroup: files\nhosts: files\n"


def test_ip_commands() -> None:
    made = plan(nodes=2, interfaces={"n2": "eno1"})
    assert "addr add 10.77.0.1/24 brd + dev bridge0" in config_files.bridge_batch(made)
    cables = config_files.cable_batch(made, {"n2": 4242}).splitlines()
    assert cables == ["link add port-n2 type veth peer name eno1 netns 4242", "link set port-n2 master bridge0 up"]
    assert "addr add 10.77.0.12/24 brd + dev eno1" in config_files.node_batch(made, "n2")


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
