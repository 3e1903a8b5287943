"""Finding a box, and what the command line says where there is none or where it cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from allranks.cli.cluster import cluster, per_node
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.lab.cluster import box as boxes
from allranks.lab.cluster import processes, requirements
from allranks.lab.cluster.faults import FAULTS, bits_per_s
from allranks.lab.cluster.plan import FaultRecord, save
from allranks.lab.cluster.processes import check_output, last_lines, run_command


@pytest.fixture(autouse=True)
def empty_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(boxes, "state_root", lambda: tmp_path / "state")
    monkeypatch.delenv(boxes.NAME_VARIABLE, raising=False)
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


def test_importing_is_light() -> None:
    code = (
        "import sys, allranks.lab.cluster; heavy = {'torch', 'jinja2', 'rich', 'click'} & set(sys.modules); "
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_command_needs_click_and_msgspec_only() -> None:
    code = (
        "import sys, allranks.cli.cluster; heavy = {'torch', 'numpy', 'yaml', 'psutil', 'jinja2', 'rich'} & "
        "set(sys.modules); sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_published_file_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(FaultRecord("cut-link", "n2"), tmp_path / "client.json", mode=0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "client.json").stat().st_mode) == 0o600


def test_a_box_is_chosen_as_slurms_clients_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    up: list[SimpleNamespace] = []
    monkeypatch.setattr(boxes, "list_boxes", lambda: up)
    up.append(SimpleNamespace(name="a"))
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


def test_own_processes_and_mounts_are_read() -> None:
    me = os.getpid()
    assert me in processes.all_pids() and processes.alive(me)
    assert processes.environment(me).get("PATH") == os.environ.get("PATH")
    assert me in processes.in_namespaces("net", [str(processes.namespace("self", "net"))])
    assert any(mount.target == "/proc" and mount.kind == "proc" for mount in processes.mounts("self"))
    assert processes.marked_processes("no-such-box") == [] and processes.init_processes("no-such-box") == {}


def test_rates() -> None:
    assert (bits_per_s("10mbit"), bits_per_s("1.5gbit")) == (10_000_000, 1_500_000_000)
    for wrong in ("10", "0mbit", "-1mbit", "10 mbit", "10MB"):
        with pytest.raises(RequestError, match="--rate"):
            bits_per_s(wrong)


def test_faults_that_end_with_the_node_are_those_in_its_namespaces() -> None:
    ended = {kind for kind, fault in FAULTS.items() if fault.in_namespaces}
    assert ended == {"stop-slurmd", "cut-link", "slow-link", "interface-down", "fill-disk", "hide-folder"}
