"""Every strategy has its page, its picture and its row, and they are those that the script writes."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from allranks.spec.strategies import REGISTRY
from allranks.train import strategies
from tests.conftest import REPO

DOCS = REPO / "docs" / "strategies"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_strategy_pages", REPO / "scripts" / "make_strategy_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_script_knows_no_single_strategy() -> None:
    source = (REPO / "scripts" / "make_strategy_pages.py").read_text()
    constants = source[: source.index("def readme")]  # the index explains how to choose
    assert not [name for name in REGISTRY if re.search(rf"\b{name}\b", constants)]


@pytest.mark.parametrize("name", REGISTRY)
def test_page_and_picture_are_there_and_up_to_date(name: str, writer: ModuleType) -> None:
    hint = "run python scripts/make_strategy_pages.py"
    assert (DOCS / f"{name}.md").read_text() == writer.text(name), hint
    assert (DOCS / "img" / f"{name}.svg").read_text() == writer.picture(name), hint


@pytest.mark.parametrize("name", REGISTRY)
def test_page_names_the_options_of_the_registry_with_their_defaults(name: str) -> None:
    (line,) = re.findall(r"^\| options \| (.*) \|$", (DOCS / f"{name}.md").read_text(), re.MULTILINE)
    named = dict(re.findall(r"`(\w+)`(?: \(([^)]*)\))?", line))
    assert named.keys() == REGISTRY[name].options.keys()
    for key, value in named.items():
        if value:
            default = REGISTRY[name].options[key]
            assert value in (str(default).lower(), f"{default:g}" if isinstance(default, float) else ""), key


@pytest.mark.parametrize("name", REGISTRY)
def test_picture_is_well_formed_and_nothing_sticks_out(name: str) -> None:
    picture = ElementTree.fromstring((DOCS / "img" / f"{name}.svg").read_text())  # noqa: S314 - our own file
    width = float(picture.attrib["viewBox"].split()[2])
    for bar in picture.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(bar.get("x", 0)) + float(bar.attrib["width"]) <= width


def test_the_table_has_a_row_for_each_and_nothing_else() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(REGISTRY)
    assert all(name == page for name, page in rows)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_table_says_of_overlap_what_the_strategy_claims(name: str) -> None:
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", (DOCS / "README.md").read_text(), re.MULTILINE)
    claims = strategies.create(name, {}).claims_overlap
    assert row.split("|")[4].strip() == ("yes" if claims else "no")


def test_no_page_or_picture_is_left_over() -> None:
    assert {p.stem for p in DOCS.glob("*.md")} == {*REGISTRY, "README"}
    assert {p.stem for p in (DOCS / "img").glob("*.svg")} == set(REGISTRY)
