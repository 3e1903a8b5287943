"""Every rule on scripts that have its trap and on near ones that do not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.lint import LintReport, lint
from allranks.analysis.lint.job import LintRule
from allranks.analysis.lint.rules import RULES, TOPICS
from allranks.analysis.lint.rules.examples import EXAMPLES, script_of
from allranks.analysis.lint.rules.ports import port_range
from tests.conftest import REPO
from tests.lint import cases, script_cases
from tests.lint.condition_cases import CONDITION_CASES
from tests.lint.container_cases import CONTAINER_CASES
from tests.lint.count_cases import COUNT_CASES, REQUEST_CASES, VISIBLE_CASES
from tests.lint.data_flow_cases import DATA_FLOW_CASES
from tests.lint.derived_cases import COUNTED_CASES, DERIVED_CASES, PASSED_CASES, VALUE_CASES
from tests.lint.evidence_cases import CASES as EVIDENCE_CASES
from tests.lint.flow_cases import FLOW_CASES
from tests.lint.generated_cases import GENERATED_CASES
from tests.lint.helpers import found, lint_text
from tests.lint.inline_cases import INLINE_CASES
from tests.lint.launch_cases import LAUNCH_CASES
from tests.lint.line_cases import ARGUMENT_CASES, LINE_CASES
from tests.lint.meant_cases import MEANT_CASES
from tests.lint.mismatch_cases import MISMATCH_CASES
from tests.lint.name_cases import NAME_CASES
from tests.lint.neighbour_cases import NEIGHBOUR_CASES
from tests.lint.option_cases import OPTION_CASES
from tests.lint.placement_cases import PLACEMENT
from tests.lint.plain_cases import PLAIN_CASES
from tests.lint.precision_cases import PRECISION_CASES
from tests.lint.program_cases import PROGRAM_CASES
from tests.lint.progress_cases import PROGRESS_CASES
from tests.lint.resource_cases import RESOURCE_CASES
from tests.lint.result_cases import RESULT_CASES
from tests.lint.several_cases import SEVERAL_CASES
from tests.lint.shell_cases import SHELL_CASES
from tests.lint.slip_cases import SLIP_CASES
from tests.lint.status_cases import STATUS_CASES
from tests.lint.step_cases import STEP_CASES
from tests.lint.submission_cases import SUBMISSION_CASES
from tests.lint.subshell_cases import SUBSHELL_CASES
from tests.lint.system_cases import SYSTEM_CASES
from tests.lint.taken_cases import TAKEN_CASES
from tests.lint.text_cases import TEXT_CASES
from tests.lint.told_cases import TOLD_CASES
from tests.lint.unused_cases import UNUSED_CASES
from tests.lint.usage_cases import USAGE_CASES

BAD = [*cases.BAD, *script_cases.SCRIPT_BAD]
GOOD = [*cases.GOOD, *script_cases.SCRIPT_GOOD]
CASES = [
    *EVIDENCE_CASES,
    *DATA_FLOW_CASES,
    *DERIVED_CASES,
    *VALUE_CASES,
    *COUNTED_CASES,
    *PASSED_CASES,
    *SHELL_CASES,
    *GENERATED_CASES,
    *NAME_CASES,
    *MISMATCH_CASES,
    *STATUS_CASES,
    *STEP_CASES,
    *LINE_CASES,
    *ARGUMENT_CASES,
    *PROGRAM_CASES,
    *PROGRESS_CASES,
    *OPTION_CASES,
    *COUNT_CASES,
    *REQUEST_CASES,
    *VISIBLE_CASES,
    *SUBMISSION_CASES,
    *SUBSHELL_CASES,
    *CONDITION_CASES,
    *CONTAINER_CASES,
    *TAKEN_CASES,
    *LAUNCH_CASES,
    *RESOURCE_CASES,
    *INLINE_CASES,
    *NEIGHBOUR_CASES,
    *PRECISION_CASES,
    *PLAIN_CASES,
    *TEXT_CASES,
    *TOLD_CASES,
    *UNUSED_CASES,
    *USAGE_CASES,
    *FLOW_CASES,
    *SYSTEM_CASES,
    *SEVERAL_CASES,
    *SLIP_CASES,
    *RESULT_CASES,
    *MEANT_CASES,
]

GOOD_FILES = sorted((Path(__file__).parent / "good").iterdir())


def rules_of(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """The rules that some rows are about. One test takes all rows of a rule: thousands of tests would cost more than the rows."""
    return sorted({row[0] for row in rows})


def wrong_rows(
    tmp_path: Path, rows: Iterable[tuple[Any, ...]], is_right: Callable[[LintReport, Any], bool]
) -> list[str]:
    """The scripts of the rows whose report is not right or that were not read whole, with their findings."""
    wrong = []
    for row in rows:
        report = lint_text(tmp_path, row[1])
        if report.unread or not is_right(report, row):
            wrong.append(f"{row[1]}\nexpected {row[2:]}, found {found(report)}, unread {report.unread}")
    return wrong


@pytest.mark.parametrize("rule", rules_of(BAD))
def test_the_trap_is_found_in_its_line(tmp_path: Path, rule: str) -> None:
    rows = [row for row in BAD if row[0] == rule]
    wrong = wrong_rows(tmp_path, rows, lambda report, row: (rule, row[2]) in found(report))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("rule", rules_of(GOOD))
def test_a_near_script_is_left_alone(tmp_path: Path, rule: str) -> None:
    rows = [row for row in GOOD if row[0] == rule]
    wrong = wrong_rows(tmp_path, rows, lambda report, row: rule not in {f.id for f in report.findings})
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("rule", rules_of([*CASES, *PLACEMENT]))
def test_what_a_script_shows_decides(tmp_path: Path, rule: str) -> None:
    def is_right(report: LintReport, row: Any) -> bool:
        _, _, line, severity = row
        hits = {(f.line, f.severity) for f in report.findings if f.id == rule}
        return hits == ({(line, severity)} if line else set())

    wrong = wrong_rows(tmp_path, [row for row in (*CASES, *PLACEMENT) if row[0] == rule], is_right)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("path", GOOD_FILES, ids=lambda p: p.name)
def test_good_scripts_give_nothing(path: Path) -> None:
    report = lint([path])
    assert not report.findings, [f"{f.line} {f.id}: {f.message}" for f in report.findings]
    assert not report.unread


def test_there_are_a_dozen_good_scripts() -> None:
    assert len(GOOD_FILES) >= 12


def test_every_rule_has_cases_and_a_page() -> None:
    bad = (
        {rule for rule, *_ in BAD} | {rule for rule, _, line, _ in [*CASES, *PLACEMENT] if line} | {"unterminated"}
    )  # its file is read in part only: test_files.py
    assert {rule.id for rule in RULES} <= bad, {rule.id for rule in RULES} - bad
    assert {rule for rule, *_ in (*BAD, *GOOD)} <= {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert {rule for topic in TOPICS for rule in topic} <= {rule.id for rule in RULES}
    assert set(EXAMPLES) == {rule.id for rule in RULES}


def test_the_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_lint_pages", REPO / "scripts" / "make_lint_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hint = "run python scripts/make_lint_pages.py"
    pages = {path.stem: path.read_text() for path in (REPO / "docs" / "lint").glob("*.md")}
    assert pages == {rule.id: module.page(rule) for rule in RULES}, hint
    text = (REPO / "docs" / "lint.md").read_text()
    assert module.overview(text) == text, hint


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_example_of_a_page_is_reported_and_its_repair_is_not(tmp_path: Path, rule: LintRule) -> None:
    example = EXAMPLES[rule.id]

    def severities(fragment: str, name: str) -> set[str]:
        script = fragment if rule.id == "no-shebang" else script_of(fragment)
        return {f.severity for f in lint_text(tmp_path, script, name).findings if f.id == rule.id}

    before = severities(example.bad, "bad.sbatch")
    assert before and not before & severities(example.good, "good.sbatch")


def test_facts_of_a_script_decide_what_is_a_warning(tmp_path: Path) -> None:
    """Unknown is a note, and notes are not shown by default."""
    job = "#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --gres=gpu:{gpus}\n{more}export MASTER_PORT=29500\nsrun python x.py\n"

    def severity(nodes: int, gpus: int, more: str = "") -> str | None:
        report = lint_text(tmp_path, job.format(nodes=nodes, gpus=gpus, more=more))
        return next((f.severity for f in report.findings if f.id == "fixed-port"), None)

    assert severity(1, 1, "#SBATCH --mem=32G\n") == "note", "another job may be on the node, but need not use the port"
    assert severity(1, 2) == severity(1, 2, "#SBATCH -c 80\n") == "note", "perhaps these are all CPUs of the node"
    assert severity(1, 4, "#SBATCH --mem=32G\n") == "note", "four GPUs are a whole node of many clusters"
    assert severity(2, 2, "#SBATCH --mem=32G\n") == "note", "other jobs would have to meet it on its first node"
    assert severity(2, 2, "#SBATCH --array=0-9\n") == "warning", "tasks of an array run at the same time"
    for whole in (
        "#SBATCH --exclusive\n",
        "#SBATCH --mem=0\n",
        "#SBATCH -p booster\n",
        "#SBATCH -C gpu\n#SBATCH -q regular\n",
    ):
        assert severity(1, 1, whole) is None, whole
    assert severity(1, 8) is None
    assert severity(1, 1, "#SBATCH --exclusive=user\n#SBATCH --mem=32G\n") == "note", (
        "the user's own jobs can be on the node"
    )


def test_one_mistake_is_reported_once_per_line(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -N 2\nexport GLOO_SOCKET_IFNAME==eth0\n"
    assert found(lint_text(tmp_path, text)) == [("gloo-interface-syntax", 3)]
    both = "#!/bin/bash\n#SBATCH -o no_logs/a\n#SBATCH -e no_logs/b\nls\n"
    assert found(lint_text(tmp_path, both)) == [("output-folder", 2)]
    (tmp_path / "no_logs").mkdir()
    assert found(lint_text(tmp_path, both)) == [], "it is next to the script"


def test_placeholders_are_reported_once_and_silence_their_lines(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --account=<account>\n#SBATCH --nodes={{ $nodes }}\nexport HF_TOKEN=hf_XXXXXXXXXXXXXXXXXXXXXXXX\nsrun python /path/to/x.py\n"
    report = lint_text(tmp_path, text)
    assert [(f.id, f.line, f.severity) for f in report.findings if f.severity != "note" or f.id == "placeholder"] == [
        ("placeholder", 2, "note")
    ]
    assert "<account> (line 2), {{ $nodes }} (line 3)" in report.findings[0].message


@pytest.mark.parametrize(("rule", "text", "line"), BAD[::5])
def test_every_finding_says_all(tmp_path: Path, rule: str, text: str, line: int) -> None:
    for finding in lint_text(tmp_path, text).findings:
        assert finding.message and finding.why and finding.cure and finding.source, finding
        assert finding.severity in ("error", "warning", "note")
        assert finding.text in text or finding.id == "secret-in-script", "only secrets are redacted"
        assert finding.column >= 1


def test_rules_in_brackets_are_ignored(tmp_path: Path) -> None:
    line = "export NCCL_P2P_DISABLE=1"
    for text in (
        f"#!/bin/bash\n# allranks: ignore[transport-disabled]\n{line}\n",
        f"#!/bin/bash\n{line}  # allranks: ignore[no-effect, transport-disabled] copies hang\n",
        f"#!/bin/bash\n{line} # allranks: ignore[*]\n",
        f"#!/bin/bash\n# allranks: ignore-file[transport-disabled]\n\n{line}\n{line}\n",
    ):
        report = lint_text(tmp_path, text)
        assert not report.findings and {f.id for f in report.allowed} == {"transport-disabled"}, text
    other = lint_text(
        tmp_path,
        f"#!/bin/bash\n# allranks: ignore[fixed-port]\n{line}\n# allranks: ignore[transport-disabled]\nls\n{line}\n",
    )
    assert found(other) == [("transport-disabled", 3), ("transport-disabled", 6)]
    directive = "#!/bin/bash\n#SBATCH --nodes=$N # allranks: ignore[variable-in-directive]\nls\n"
    assert not lint_text(tmp_path, directive).findings


@pytest.mark.parametrize(
    ("value", "span"),
    [
        ("12345", (12345, 12345)),
        ("${MASTER_PORT:-29500}", (29500, 29500)),
        ("$((10000 + SLURM_JOB_ID % 20000))", (10000, 29999)),
        ("$(( ($RANDOM % 10) * 1000 + 20000 ))", (20000, 29000)),
        ("$(($RANDOM + 1024))", (1024, 33791)),
        ("$[ RANDOM % 100 + 50 ]", (50, 149)),
        ("$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))", (10000, 19999)),
        ("$(expr 10000 + $(echo $SLURM_JOBID | tail -c 4))", (10000, 10999)),
        ("$((10000 + 10#${SLURM_JOB_ID: -4}))", (10000, 19999)),
        ("4${SLURM_JOB_ID: -4}", (40000, 49999)),
        ("$(seq 5000 6000 | shuf | head -n1)", (5000, 6000)),
        ("$((SLURM_JOB_ID))", None),
        ("$((10000 + $(date +%s) % 500))", (10000, 10499)),
        ("$((1 / 0))", None),
        ("$((1 +))", None),
        ("$(python free_port.py)", None),
    ],
)
def test_the_range_of_a_port(value: str, span: tuple[int, int] | None) -> None:
    assert port_range(value) == span


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


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("#SBATCH --output=logs/%j.out\nls\n", "warning"),
        ("# mkdir -p logs\n#SBATCH -o logs/%j.out\nls\n", "note"),
        ("#SBATCH -o lightning_logs/%j.out\nls\n", "note"),
        ('#SBATCH -o logs/%j.out\nmkdir -p "$SCRATCH/logs"\n', "note"),
    ],
)
def test_a_missing_log_folder_is_a_warning_in_a_checkout_unless_it_may_come_later(
    tmp_path: Path, text: str, severity: str
) -> None:
    alone = lint_text(tmp_path, "#!/bin/bash\n" + text).findings
    assert [f.severity for f in alone if f.id == "output-folder"] == ["note"]
    (tmp_path / ".git").mkdir()
    inside = lint_text(tmp_path, "#!/bin/bash\n" + text).findings
    assert [f.severity for f in inside if f.id == "output-folder"] == [severity]


def test_a_folder_of_redirected_output_is_a_warning_in_a_checkout_that_does_not_have_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    text = "#!/bin/bash\n#SBATCH --nodes=1\npython x.py > logs/x.log\n"
    severities = [f.severity for f in lint_text(tmp_path, text).findings if f.id == "output-folder"]
    assert severities == ["warning"]
    (tmp_path / "logs").mkdir()
    assert "output-folder" not in [f.id for f in lint_text(tmp_path, text).findings]
