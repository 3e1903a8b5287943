"""The list of launchers, who may know their names, and what `allranks plan` loads of them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import allranks
from allranks.launch.launchers import launcher_of
from allranks.launch.slurm.launcher import SlurmLauncher
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec.launchers import LAUNCHERS
from allranks.spec.strategies import REGISTRY

HEAVY = ["allranks.launch.supervisor", "allranks.launch.channel", "allranks.nodes.slurm", "jinja2", "torch", "asyncio"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_loads_what_starts_jobs_only_when_it_starts_one(name: str) -> None:
    code = f"""
import sys
from collections.abc import Iterator
from pathlib import Path
from allranks.launch import preview
from allranks.launch.launchers import get_launcher
get_launcher({name!r})
print([m for m in {HEAVY!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_launcher_of_a_run_is_known_by_what_it_left(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not isinstance(launcher_of(run), SlurmLauncher)
    run.driver.parent.mkdir()
    write_json(run.driver, {"state": "done"})
    assert isinstance(launcher_of(run), SlurmLauncher)


def names_compared(text: str, known: set[str], *subjects: str) -> Iterator[str]:
    """Describe each comparison of a subject with a known name, and each choice by its name."""
    for node in ast.walk(ast.parse(text)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            patterns = [p.value for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
            sides = [node.subject, *patterns]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            sides = [node.slice, *filter(None, node.value.keys)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            chosen = isinstance(node.func.value, ast.Dict) and node.func.attr == "get"
            sides = [node.args[0], node.func.value] if chosen or node.func.attr in ("startswith", "endswith") else []
        names = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        said = " ".join(ast.unparse(side) for side in sides).lower()
        if names & known and any(subject in said for subject in subjects):
            yield f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def test_nothing_compares_a_launcher_or_a_strategy_with_a_name() -> None:
    strategies = {*REGISTRY, *(f"{name.split('_')[0]}{end}" for name in REGISTRY for end in ("", "_"))}
    found = []
    for file in sorted(Path(allranks.__file__).parent.rglob("*.py")):
        for known, subjects in (({*LAUNCHERS}, ("launcher", "machine")), (strategies, ("strategy",))):
            found += [f"{file} {problem}" for problem in names_compared(file.read_text(), known, *subjects)]
    assert not found, "\n".join(found)
