"""Objects of other libraries are changed in one module, by versions that the tests have run with."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import allranks
from allranks.train.patches import VERIFIED
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


def test_the_tested_versions_are_those_that_the_patches_were_verified_for() -> None:
    pinned = dict(line.split("==") for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line)
    (pinned["torch"],) = re.findall(r"TORCH:-([\d.]+)", (REPO / "scripts" / "setup.sh").read_text())
    assert {package: ".".join(pinned[package].split(".")[:2]) for package in VERIFIED} == VERIFIED
