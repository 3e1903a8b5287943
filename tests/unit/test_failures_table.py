"""The table of the forty failures holds what it says: pages with their parts, tests that exist, an index that is up to date."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES, KnownFailure
from tests.conftest import REPO

HEADINGS = ["Symptom", "Cause", "What allranks does", "Fix", "Tests"]
EACH = pytest.mark.parametrize("failure", KNOWN_FAILURES, ids=lambda f: f"{f.number:02d}")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py::[^`]+)`")


def page_of(failure: KnownFailure) -> str:
    """The section of a failure."""
    file, _, anchor = failure.page.partition("#")
    _, _, rest = (REPO / file).read_text().partition(f'<a id="{anchor}"></a>\n\n')
    return rest.partition("\n<a id=")[0]


def proofs_of(failure: KnownFailure) -> list[str]:
    """The node ids that the page names as proof."""
    return NODE_ID.findall(page_of(failure).split("### Tests")[1])


def test_all_forty_are_there_once() -> None:
    assert [f.number for f in KNOWN_FAILURES] == list(range(1, 41))
    assert len({f.title for f in KNOWN_FAILURES}) == 40


@EACH
def test_record_is_whole(failure: KnownFailure) -> None:
    assert failure.how in ("P", "R", "D")
    assert len(failure.where) > 10
    assert not set(failure.classes) - set(CATALOGUE)


@EACH
def test_page_has_its_parts_in_order(failure: KnownFailure) -> None:
    text = page_of(failure)
    assert text.startswith(f"## {failure.number}. ")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == HEADINGS
    for part in text.split("\n### ")[1:]:
        assert len(part.partition("\n")[2].split()) > 8, part


@EACH
def test_page_names_tests(failure: KnownFailure) -> None:
    last = page_of(failure).split("### Tests")[1]
    assert proofs_of(failure), "no test shows it"
    assert failure.evidence != "replayed" or "replay" in last.lower()


@EACH
def test_page_and_record_say_the_same_way(failure: KnownFailure) -> None:
    word = {"P": "Prevented", "R": "Refused", "D": "Named"}[failure.how]
    assert page_of(failure).split("### What allranks does\n\n")[1].startswith(f"**{word}")


@EACH
def test_named_tests_exist(failure: KnownFailure) -> None:
    for node in proofs_of(failure):
        problem = missing(node)
        assert problem is None, f"{node}: {problem}"


def missing(node: str) -> str | None:
    """Why a node id names no test, found by reading files and not by running them; None if it names one."""
    file, _, rest = node.partition("::")
    name, bracket, case = rest.partition("[")
    path = REPO / file
    if not path.is_file():
        return "there is no such file"
    if name not in functions(path):
        return "there is no such function"
    if bracket and not all(part in words_around(path) for part in case.rstrip("]").split("-")):
        return "no such case is written there"
    return None


@cache
def functions(path: Path) -> frozenset[str]:
    nodes = ast.parse(path.read_text()).body
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


@cache
def words_around(path: Path) -> str:
    """What a case may be called after: the file, the files of tests that it imports, and the catalogue's classes."""
    texts = [path.read_text(), *CATALOGUE]
    for node in ast.walk(ast.parse(texts[0])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            other = REPO.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            texts += [other.read_text()] if other.is_file() else []
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ("tests/unit/test_nothing.py::test_x", "file"),
        ("tests/unit/test_failures_table.py::test_x", "function"),
        ("tests/unit/test_failures_table.py::missing", "function"),
        ("tests/unit/test_cache.py::test_a_damaged_entry_is_built_anew[bites]", "case"),
        ("tests/unit/test_cache.py::test_a_damaged_entry_is_built_anew[bytes]", None),
        ("tests/unit/test_diagnose_catalogue.py::test_example_is_named_first[port_in_use]", None),
    ],
)
def test_a_node_id_that_leads_nowhere_is_seen(node: str, problem: str | None) -> None:
    found = missing(node)
    assert found == problem if problem is None else problem in (found or "")


def test_the_verb_lists_all_and_json_holds_each_field() -> None:
    from click.testing import CliRunner

    from allranks.cli.diagnose import failures_command

    shown = CliRunner().invoke(failures_command, [], env={"COLUMNS": "80"}, standalone_mode=False).output
    assert max(len(line) for line in shown.splitlines()) <= 80
    for failure in KNOWN_FAILURES:
        assert re.search(rf"^ *{failure.number}  +\S.*  {failure.how}  ", shown, re.MULTILINE), failure.number
    told = CliRunner().invoke(failures_command, ["--json"], standalone_mode=False).output
    rows = json.loads(told)["failures"]
    assert [r["number"] for r in rows] == list(range(1, 41))
    assert set(rows[0]) == {"number", "title", "how", "where", "page", "tests", "evidence", "classes"}


@EACH
def test_the_log_of_a_page_is_named_as_the_record_says(failure: KnownFailure, tmp_path: Path) -> None:
    """Of the blocks marked ``log`` under Symptom, diagnose names one by a class of the record; those of harmless messages it does not name."""
    blocks = re.findall(r"^```log\n(.*?)^```$", page_of(failure).split("### Cause")[0], re.MULTILINE | re.DOTALL)
    found = []
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.log"
        path.write_text(block)
        found += [f.id for f in diagnose([path]).findings[:1]]
    if failure.classes and blocks:
        assert set(found) & set(failure.classes), found
    elif failure.how == "D":
        assert found == []
