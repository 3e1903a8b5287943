"""Imports of a user's own program, found without executing it; names of the hub that nodes must have."""

import os
from pathlib import Path

import msgspec
import pytest

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.launch.doctor import DoctorOptions, doctor
from allranks.launch.launchers import get_launcher
from allranks.launch.preview import PreparedRun
from allranks.launch.runs import create
from allranks.nodes.checks.program import ask, imported_packages, source_problem
from allranks.nodes.checks.software import ask_hub_names as ask_hub
from allranks.nodes.checks.software import hub as check_hub
from allranks.nodes.preflight.request import check_paths
from allranks.nodes.preflight.requirements import node_requirements
from allranks.nodes.probes.probe import has_module, hub, is_cached
from allranks.nodes.records import HubFacts, HubItem, NodeRequirements
from allranks.spec import parse_spec
from tests.unit.preflight_nodes import REQUIRED, failures, node, survey

replace = msgspec.structs.replace
PROGRAM = '''"""A program."""
from __future__ import annotations
import os, numpy.linalg as la
import beside, package_here.part
from torch.nn import Linear
from . import relative
from typing import TYPE_CHECKING
with open(os.devnull) as f:
    import inside_with
try:
    import apex
except ImportError:
    apex = None
if TYPE_CHECKING:
    import for_types
if os.environ.get("X"):
    import sometimes
def later():
    import in_function
class Late:
    import in_class
'''


def write(folder: Path, **files: str) -> Path:
    """Write modules; ``a__b`` is b.py in a, ``a____init__`` makes a package of a."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "own.py"


def test_only_imports_that_always_run_count_and_modules_beside_the_program_are_read(tmp_path: Path) -> None:
    script = write(tmp_path, own=PROGRAM, beside="import pandas\nimport own\n", package_here__part="import einops\n")
    found = imported_packages(script, [tmp_path])
    assert found == {
        "numpy": "own.py line 3", "torch": "own.py line 5", "inside_with": "own.py line 9",
        "pandas": "beside.py line 1", "einops": "part.py line 1",
    }  # fmt: skip
    assert not (tmp_path / "__pycache__").exists(), "nothing was imported"


def test_imports_with_which_the_main_part_begins_count_in_the_program_alone(tmp_path: Path) -> None:
    main = "if __name__ == '__main__':\n    import {0}\n    run()\n    import later\nelse:\n    import other\n"
    script = write(tmp_path, own="import beside\n" + main.format("wandb"), beside=main.format("never"))
    assert imported_packages(script, [tmp_path]) == {"wandb": "own.py line 3"}
    script.write_text("if '__main__' == __name__:\n    import wandb\nif __name__ != '__main__':\n    import never\n")
    assert imported_packages(script, [tmp_path]) == {"wandb": "own.py line 2"}


@pytest.mark.parametrize("content", [b"import (", b"\xff\xfe\x00", b"\0", b"(" * 100_000])
def test_a_program_that_cannot_be_parsed_imports_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own.py").write_bytes(content)
    assert imported_packages(tmp_path / "own.py", [tmp_path]) == {}
    assert imported_packages(tmp_path / "gone.py", [tmp_path]) == {}


def program_spec(folder: Path, **cluster: object) -> object:
    return parse_spec({"script": {"path": str(folder / "own.py")}, "cluster": {"launcher": "slurm", **cluster}})


def test_the_users_pythonpath_counts_and_what_only_the_job_knows_is_unknown(tmp_path: Path) -> None:
    write(tmp_path, own="import mine, other\n", lib__mine="")
    spec = program_spec(tmp_path, env={"PYTHONPATH": str(tmp_path / "lib")})
    assert list(ask(spec, tmp_path, REQUIRED).program) == ["other"]
    assert list(node_requirements(spec, tmp_path, folder=tmp_path).program) == ["other"], "it is registered"
    for cluster in ({"modules": ["pytorch"]}, {"setup": ["export PYTHONPATH=x"]}, {"python": "conda:x"}):
        required = ask(program_spec(tmp_path, **cluster), tmp_path, REQUIRED)
        found = survey(*(replace(node(n), program={"mine": True, "other": False}) for n in (1, 2)), required=required)
        assert required.program_unknown and failures(found) == {}, cluster
    assert ask(program_spec(tmp_path, python="/images/x.sif"), tmp_path, REQUIRED).program == {}


def test_the_node_that_lacks_a_package_is_named_with_the_line(tmp_path: Path) -> None:
    required = replace(REQUIRED, program={"numpy": "own.py line 1", "einops": "own.py line 2"})
    nodes = [replace(node(n), program={"numpy": True, "einops": n != 2}) for n in (1, 2, 3)]
    bad = failures(survey(*nodes, required=required, program_here={"einops": True}))
    assert {key: check.found for key, check in bad.items()} == {"n2.program": "MISSING(einops)"}
    assert "einops (own.py line 2), which /env/bin/python on n2" in bad["n2.program"].cure
    not_here = failures(survey(*nodes, required=required))["n2.program"]
    assert bad["n2.program"].stageable and not not_here.stageable, "the launcher's machine lacks it, too"


def test_a_name_of_the_hub_is_looked_for_on_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = [name for name in os.environ if name.lower() in ("https_proxy", "all_proxy")]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", *proxies):
        monkeypatch.delenv(name, raising=False)
    cluster = {"launcher": "slurm", "cache": str(tmp_path)}

    def needed(model: str = "org/m", data: str = "org/d", **env: str) -> NodeRequirements:
        raw = {"model": {"name": model}, "data": {"source": data}, "cluster": {**cluster, "env": env}}
        return ask_hub(parse_spec(raw), tmp_path, REQUIRED)

    required = needed()
    assert [(item.key, item.name, item.folders[0], item.here) for item in required.hub] == [
        ("model.name", "org/m", f"{tmp_path}/hub/models--org--m", False),
        ("data.source", "org/d", f"{tmp_path}/hub/datasets--org--d", False),
    ]
    assert required.hub_address == "huggingface.co:443"
    monkeypatch.setenv("HTTPS_PROXY", "proxy.site:3128")
    assert needed().hub_address == "proxy.site:3128"
    offline = needed(HF_HUB_OFFLINE="1")
    assert (offline.hub_offline, offline.hub_address) == ("HF_HUB_OFFLINE", "")
    assert needed("tiny:mistral", "builtin:news").hub == []


@pytest.mark.parametrize(
    ("facts", "offline", "found"),
    [
        (HubFacts(cached={"org/m": True}), "", "cached"),
        (HubFacts(cached={"org/m": False}, reached=True), "", "reachable"),
        (HubFacts(error="no answer within 20 s"), "HF_HUB_OFFLINE", "unknown"),
        (None, "", "unknown"),
        (HubFacts(cached={"org/m": False}, reached=False, error="timed out"), "", "NOT-CACHED(org/m)"),
        (HubFacts(cached={"org/m": False}), "HF_HUB_OFFLINE", "NOT-CACHED(org/m)"),
    ],
)
def test_what_a_node_says_of_the_hub(facts: HubFacts | None, offline: str, found: str) -> None:
    item = HubItem(key="model.name", name="org/m", folders=["/cache/hub/models--org--m"])
    required = replace(REQUIRED, hub=[item], hub_offline=offline, hub_address="" if offline else "huggingface.co:443")
    check = check_hub(survey(node(1), node(2, hub=facts), required=required))["n2"]
    assert check.found == found and check.ok is not found.startswith("NOT")
    if not check.ok:
        assert ("HF_HUB_OFFLINE disables" if offline else "does not reach huggingface.co:443: timed out") in check.cure
        assert "hf download org/m" in check.cure and not check.stageable


def test_doctor_and_run_say_the_same_of_a_program_on_this_machine(tmp_path: Path) -> None:
    write(tmp_path, own="import torch\nimport nosuch_package\n")
    raw = {"script": {"path": str(tmp_path / "own.py")}, "cluster": {"device": "cpu"}}
    spec = parse_spec({"name": "t", "run_root": str(tmp_path / "runs"), **raw})
    launcher, options = get_launcher("local"), DoctorOptions(imports=False)
    found = doctor(PreparedRun(spec), options, launcher.nodes_to_examine(spec, wait_s=1, say=print), print)
    (check,) = (c for report in found.preflight.reports for c in report.checks if not c.ok)
    assert (check.name, check.found, found.ok, found.starts) == ("program", "MISSING(nosuch_package)", False, False)
    with pytest.raises(EnvironmentNotAble) as refused:
        create(PreparedRun(spec))
    assert f"program: {check.cure}" in str(refused.value) and "own.py line 2" in check.cure
    assert not (tmp_path / "runs").exists()


def test_modules_count_only_where_python_looks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a path Python sees the program's folder, with a module the working directory."""
    write(tmp_path, project____init__="", project__utils="", project__train="import utils\n")
    write(tmp_path, tools__train="import project.utils\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert not has_module("project"), "the folder of the command is not the ranks'"
    path = {"path": "tools/train.py"}
    for script, pythonpath, name in (
        (path, "", "project"), ({"module": "project.train"}, "", "utils"),
        ({"module": "tools.train"}, "", None), (path, str(tmp_path), None),
    ):  # fmt: skip
        env = {"PYTHONPATH": pythonpath} if pythonpath else {}
        raw = {"script": script, "cluster": {"launcher": "slurm", "env": env}}
        assert ask(parse_spec(raw), tmp_path, REQUIRED).program == ({name: "train.py line 1"} if name else {}), script


def test_a_program_that_cannot_be_executed_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    script = parse_spec({"script": {"path": str(path)}}).script
    shell = ("#!/bin/bash\nset -e\n", "its first line is '#!/bin/bash', so it is not a Python program")
    for text, says in (("import os\nprint('a' os)\n", "line 2: invalid syntax"), shell):
        path.write_text(text)
        assert f"script.path {path}: {says}" in (source_problem(script, path) or "")
    path.write_text("#!/usr/bin/env python3\n'\\d'\n")
    assert source_problem(script, path) is None


def test_an_interrupted_download_is_not_in_the_cache(tmp_path: Path) -> None:
    model = tmp_path / "models--org--m"
    for part in ("refs", "blobs", "snapshots/abc"):
        (model / part).mkdir(parents=True)
    (model / "blobs" / "x.incomplete").touch()
    prepared = tmp_path / "org___d"
    prepared.mkdir()
    assert [is_cached(str(path)) for path in (model, prepared, tmp_path / "gone")] == [False, False, False]
    (model / "snapshots" / "abc" / "config.json").touch()
    (prepared / "default").mkdir()
    assert [is_cached(str(path)) for path in (model, prepared)] == [True, True]
    assert hub([{"name": "org/m", "folders": [str(model)]}], "127.0.0.1:9") == {"cached": {"org/m": True}}
    asked = hub([{"name": "org/n", "folders": [str(tmp_path / "gone")]}], "127.0.0.1:9")
    assert asked["reached"] is False and "refused" in asked["error"]


def test_what_is_missing_here_counts_unless_nodes_may_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    (shared / "env" / "bin").mkdir(parents=True)
    (shared / "env" / "bin" / "activate").touch()
    write(shared, own="")
    monkeypatch.chdir(shared)
    monkeypatch.setattr("allranks.nodes.staging.broadcast.TEMPORARY_FOLDERS", (tmp_path / "tmp",))
    (tmp_path / "tmp").mkdir()

    def check(path: str = "own.py", **cluster: object) -> None:
        raw = {"script": {"path": path}, "run_root": "runs", "cluster": {"launcher": "slurm", **cluster}}
        check_paths(parse_spec(raw))

    check()
    check(python=str(shared / "env"), slurm={"chdir": str(shared)})
    for path in ("/only/on/nodes/own.py", str(tmp_path / "tmp" / "own.py")):
        check(path)
    check(python="/only/on/nodes/env", slurm={"chdir": "/only/on/nodes"})
    check(python="conda:x")
    for key, change in (
        ("script.path gone.py", {"path": "gone.py"}),
        ("script.path .*gone.py", {"path": str(shared / "gone.py")}),
        ("script.path .*env: this is a folder", {"path": str(shared / "env")}),
        ("cluster.python .*noenv", {"python": str(shared / "noenv")}),
        ("cluster.python env/bin", {"python": "env/bin"}),
        ("cluster.slurm.chdir .*no: there is no such folder", {"slurm": {"chdir": str(shared / "no")}}),
    ):
        with pytest.raises(SpecError, match=key):
            check(**change)  # type: ignore[arg-type]
