"""Objects of other libraries are changed in one module, by versions that the tests have run with."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks.train.patches import VERIFIED, cached_scan
from tests.conftest import REPO

SOURCE = Path(allranks.__file__).parent
OWN = ("allranks", "__future__", "sys")  # Python's own `sys.argv` is there to be set


def changes(text: str) -> Iterator[str]:
    """Describe each assignment to an attribute of an imported foreign object, or to the forward of a module."""
    tree = ast.parse(text)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(a.asname or a.name).partition(".")[0] for a in node.names if not a.name.startswith(OWN)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(OWN):
            foreign |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                named = isinstance(root, ast.Name) and root.id in foreign
                if isinstance(target, ast.Attribute) and (named or target.attr == "forward"):
                    yield f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":  # noqa: SIM102 - read apart
            if ast.unparse(node.args[0]) in foreign | {"c10d"}:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_other_libraries_are_changed_in_one_module() -> None:
    found = [
        f"{file.relative_to(SOURCE)} {problem}"
        for file in sorted((SOURCE / "train").rglob("*.py"))
        for problem in changes(file.read_text())
        if file.name != "patches.py"
    ]
    assert not found, "\n".join(found)
    assert len(list(changes((SOURCE / "train" / "patches.py").read_text()))) >= 4


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.Work.wait = f",
        "import torch\ndef f():\n  torch.cpu.set_device = g",
        "from peft import PeftModel\nPeftModel.merge = f",
        "layer.forward = f",
        "setattr(c10d, name, f)",
    ],
)
def test_the_check_sees_a_change(text: str) -> None:
    assert list(changes(text))


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def test_the_tested_versions_are_those_that_the_patches_were_verified_for() -> None:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    (pinned["torch"],) = re.findall(r"TORCH:-([\d.]+)", (REPO / "scripts" / "setup.sh").read_text())
    for package, (first, last) in VERIFIED.items():
        assert version(first) <= version(pinned[package]) <= version(last), package


def test_transformers_reads_its_sources_in_the_first_process_only(tmp_path: Path) -> None:
    code = (
        "from allranks.train.patches import scan_transformers_once as once\n"
        "once()\n"
        "import transformers, transformers.models\n"
        "from transformers.utils import import_utils as it\n"
        "print(it.create_import_structure_from_path.__wrapped__.cache_info().misses)\n"
        "assert transformers.MistralConfig.__name__ == 'MistralConfig'\n"
        "assert 'MistralForCausalLM' in dir(transformers)\n"
    )
    command, env = [sys.executable, "-c", code], {**os.environ, "HF_HOME": str(tmp_path)}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert int(first.stdout) > 400 and int(second.stdout) == 0, "folders that were read"


def packages(root: Path, n: int = 120) -> Path:
    for i in range(n):
        (root / f"m{i}").mkdir(parents=True)
        (root / f"m{i}" / "modeling.py").write_text(f"__all__ = ['A{i}']")
    return root


@pytest.fixture
def scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A folder of many packages, and what was scanned of it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return packages(tmp_path / "models"), []


FOUND = {"m1": {frozenset({"torch"}): {"modeling": {"A", "B"}}, frozenset(): {}}, "m2": {}}


def scan(folder: Path, calls: list[str]) -> dict[Any, Any]:
    def read(path: str) -> dict[Any, Any]:
        calls.append(path)
        return FOUND

    return cached_scan(read, str(folder))


def test_a_scan_is_kept_until_a_file_changes(scanned: tuple[Path, list[str]]) -> None:
    folder, calls = scanned
    assert scan(folder, calls) == scan(folder, calls) == FOUND and len(calls) == 1
    (folder / "m7" / "modeling.py").write_text("__all__ = ['Other']")
    assert scan(folder, calls) == FOUND and len(calls) == 2
    (folder / "m7" / "new.py").write_text("")
    assert scan(folder, calls) == FOUND and len(calls) == 3


@pytest.mark.parametrize("content", ["", "{}", '{"": [[1, 2]]}', "[" * 5000, "null"])
def test_a_damaged_cache_is_scanned_again(scanned: tuple[Path, list[str]], content: str) -> None:
    folder, calls = scanned
    scan(folder, calls)
    (file,) = (folder.parent / "hf").rglob("transformers-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(content)
    assert scan(folder, calls) == FOUND and len(calls) == 2


def test_a_cache_that_cannot_be_written_does_no_harm(
    scanned: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = scanned
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(folder.parent / "file"))
    assert scan(folder, calls) == scan(folder, calls) == FOUND and len(calls) == 2


def test_few_files_are_not_kept(scanned: tuple[Path, list[str]], tmp_path: Path) -> None:
    few, calls = packages(tmp_path / "few", 3), scanned[1]
    assert scan(few, calls) == scan(few, calls) == FOUND and len(calls) == 2


def test_keys_are_repeated_for_float32_attention_on_a_gpu() -> None:
    """Its only fused kernel there has no grouped queries."""
    from types import SimpleNamespace

    import torch
    from transformers.integrations import sdpa_attention

    from allranks.train.patches import repeat_keys_in_float32

    def grouped(device: str, dtype: object) -> bool:
        key = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 8, 64))
        return sdpa_attention.use_gqa_in_sdpa(None, key, key)

    for _ in range(2):
        repeat_keys_in_float32()
    assert not grouped("cuda", torch.float32)
    assert grouped("cuda", torch.bfloat16) and grouped("cpu", torch.float32)
