"""The table of the forty failures: pages with their parts, tests that exist, an index that is up to date."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES, KnownFailure
from tests.conftest import REPO
from tests.unit.diagnose_examples import of

HEADINGS = ["Symptom", "Cause", "What allranks does", "Fix", "Tests"]
EACH = pytest.mark.parametrize("failure", KNOWN_FAILURES, ids=lambda f: f"{f.number:02d}")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py::[^`]+)`")


def page_of(failure: KnownFailure) -> str:
    file, _, anchor = failure.page.partition("#")
    _, _, rest = (REPO / file).read_text().partition(f'<a id="{anchor}"></a>\n\n')
    return rest.partition("\n<a id=")[0]


def test_all_forty_are_there_once() -> None:
    assert [f.number for f in KNOWN_FAILURES] == list(range(1, 41))
    assert len({f.title for f in KNOWN_FAILURES}) == 40
    for failure in KNOWN_FAILURES:
        assert failure.how in ("P", "R", "D") and not set(failure.classes) - set(CATALOGUE), failure.number
        assert failure.classes or failure.how != "D" or "harmless" in failure.where, failure.number


@EACH
def test_page_has_its_parts_and_names_tests_that_exist(failure: KnownFailure) -> None:
    text = page_of(failure)
    assert text.startswith(f"## {failure.number}. ")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == HEADINGS
    for part in text.split("\n### ")[1:]:
        assert len(part.partition("\n")[2].split()) > 8, part
    word = {"P": "Prevented", "R": "Refused", "D": "Named"}[failure.how]
    assert text.split("### What allranks does\n\n")[1].startswith(f"**{word}")
    last = text.split("### Tests")[1]
    nodes = NODE_ID.findall(last)
    assert nodes, "no test shows it"
    assert failure.evidence != "replayed" or "replay" in last.lower()
    assert not [node for node in nodes if not exists(node)]


def exists(node: str) -> bool:
    """Return whether a node id names a function in a file of tests, by reading and not by running it."""
    file, _, rest = node.partition("::")
    return (REPO / file).is_file() and rest.partition("[")[0] in functions(REPO / file)


@cache
def functions(path: Path) -> frozenset[str]:
    nodes = ast.parse(path.read_text()).body
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def test_the_verb_lists_all_and_json_holds_each_field() -> None:
    from click.testing import CliRunner

    from allranks.cli.diagnose import failures_command

    shown = CliRunner().invoke(failures_command, [], env={"COLUMNS": "80"}, standalone_mode=False).output
    assert max(len(line) for line in shown.splitlines()) <= 80
    for failure in KNOWN_FAILURES:
        assert re.search(rf"^ *{failure.number}  +\S.*  {failure.how}  ", shown, re.MULTILINE), failure.number
    rows = json.loads(CliRunner().invoke(failures_command, ["--json"], standalone_mode=False).output)["failures"]
    assert [r["number"] for r in rows] == list(range(1, 41))
    assert set(rows[0]) == {"number", "title", "how", "where", "page", "tests", "evidence", "classes"}
    section = CliRunner().invoke(failures_command, ["18"], standalone_mode=False).output
    assert re.match(r"18\. Rendezvous port in use *\n", section) and "\nFix " in section and "tests/" not in section


@EACH
def test_the_log_of_a_page_is_named_as_the_record_says(failure: KnownFailure, tmp_path: Path) -> None:
    """diagnose names a block marked ``log`` under Symptom by a class of the record, none of a harmless message."""
    blocks = re.findall(r"^```log\n(.*?)^```$", page_of(failure).split("### Cause")[0], re.MULTILINE | re.DOTALL)
    found = [f.id for n, block in enumerate(blocks) for f in of(tmp_path / str(n), block).findings[:1]]
    if failure.classes and blocks:
        assert set(found) & set(failure.classes), found
    elif failure.how == "D":
        assert found == []
