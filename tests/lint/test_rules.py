"""Every rule on scripts that have its trap and on near ones that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.lint import lint
from allranks.analysis.lint.rules import RULES
from tests.conftest import REPO
from tests.lint.cases import BAD, GOOD
from tests.lint.helpers import found, lint_text

GOOD_FILES = sorted((Path(__file__).parent / "good").iterdir())


@pytest.mark.parametrize(("rule", "text", "line"), BAD, ids=lambda v: v if isinstance(v, str) and "\n" not in v else "")
def test_the_trap_is_found_in_its_line(tmp_path: Path, rule: str, text: str, line: int) -> None:
    report = lint_text(tmp_path, text)
    assert (rule, line) in found(report), found(report)
    assert not report.unread


@pytest.mark.parametrize(("rule", "text"), GOOD, ids=lambda v: v if "\n" not in v else "")
def test_a_near_script_is_left_alone(tmp_path: Path, rule: str, text: str) -> None:
    report = lint_text(tmp_path, text)
    assert rule not in {f.id for f in report.findings}, found(report)
    assert not report.unread


@pytest.mark.parametrize("path", GOOD_FILES, ids=lambda p: p.name)
def test_good_scripts_give_nothing(path: Path) -> None:
    report = lint([path])
    assert not report.findings, [f"{f.line} {f.id}: {f.message}" for f in report.findings]
    assert not report.unread


def test_there_are_a_dozen_good_scripts() -> None:
    assert len(GOOD_FILES) >= 12


def test_every_rule_has_cases_and_a_place_in_the_docs() -> None:
    page = (REPO / "docs" / "lint.md").read_text()
    bad = {rule for rule, _, _ in BAD}
    for rule in RULES:
        assert rule.id in bad, f"{rule.id} has no case"
        section = page.partition(f"### {rule.id}\n")[2].partition("\n#")[0]
        assert f"*{rule.severity}*" in section, f"docs/lint.md, {rule.id}: the severity"
        assert "- Symptom: " in section, f"docs/lint.md, {rule.id}: no symptom"
        assert f"- Why: {rule.why}\n" in section, f"docs/lint.md, {rule.id}: why it is"
        assert f"- Cure: {rule.cure}" in section, f"docs/lint.md, {rule.id}: the cure"
    assert {rule for rule, *_ in (*BAD, *GOOD)} <= {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("rule", "text", "line"), BAD[::5])
def test_every_finding_says_all(tmp_path: Path, rule: str, text: str, line: int) -> None:
    for finding in lint_text(tmp_path, text).findings:
        assert finding.message and finding.why and finding.cure and finding.source, finding
        assert finding.severity in ("error", "warning", "note")
        assert finding.text in text
        assert finding.column >= 1


def test_a_comment_allows_a_finding_with_its_reason(tmp_path: Path) -> None:
    for text in (
        "#!/bin/bash\n# allranks: allow transport-disabled copy test failed on gpu07, ACS is on\nexport NCCL_P2P_DISABLE=1\n",
        "#!/bin/bash\nexport NCCL_P2P_DISABLE=1  # allranks: allow transport-disabled copy test failed\n",
    ):
        report = lint_text(tmp_path, text)
        assert not report.findings
        assert [f.id for f in report.allowed] == ["transport-disabled"]
    bare = "#!/bin/bash\nexport NCCL_P2P_DISABLE=1  # allranks: allow transport-disabled\n"
    assert [f.id for f in lint_text(tmp_path, bare).findings] == ["transport-disabled"]
    other = "#!/bin/bash\nexport NCCL_P2P_DISABLE=1 # allranks: allow no-effect because\n"
    assert [f.id for f in lint_text(tmp_path, other).findings] == ["transport-disabled"]
