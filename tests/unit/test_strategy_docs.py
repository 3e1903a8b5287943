"""The page of strategies says what the registry and the strategies say; a test of test_docs checks that it is up to
date.
"""

from __future__ import annotations

import re

import pytest

from allranks.spec.strategies import REGISTRY
from allranks.train import strategies
from tests.conftest import REPO

PAGE = REPO / "docs" / "strategies.md"


@pytest.mark.parametrize("name", REGISTRY)
def test_section_names_the_options_of_the_registry_with_their_defaults(name: str) -> None:
    section = PAGE.read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^\| options \| (.*) \|$", section, re.MULTILINE)
    named = dict(re.findall(r"`(\w+)`(?: \(([^)]*)\))?", line))
    assert named.keys() == REGISTRY[name].options.keys()
    for key, value in named.items():
        if value:
            default = REGISTRY[name].options[key]
            assert value in (str(default).lower(), f"{default:g}" if isinstance(default, float) else ""), key


@pytest.mark.parametrize("name", REGISTRY)
def test_the_table_says_of_overlap_what_the_strategy_claims(name: str) -> None:
    (row,) = re.findall(rf"^\| \[`{name}`\].*$", PAGE.read_text(), re.MULTILINE)
    claims = strategies.create(name, {}).claims_overlap
    assert row.split("|")[4].strip() == ("yes" if claims else "no")
