"""Every rule on scripts that have its trap and on near ones that do not."""

from pathlib import Path

import pytest

from allranks.analysis.lint import SAME_MISTAKE, lint
from allranks.analysis.lint.rules import RULES, LintRule
from tests.lint.helpers import CASES, found, lint_text, script_of

GOOD_FILES = sorted((Path(__file__).parent / "good").iterdir())
WITH_VERSION = {"output-folder"}  # only where Slurm is known to be older than 23.02


@pytest.mark.parametrize("rule", sorted({case.rule for case in CASES}))
def test_the_trap_is_found_in_its_line(tmp_path: Path, rule: str) -> None:
    """Line 0: a near script that has no trap."""
    wrong = []
    for case in (c for c in CASES if c.rule == rule):
        report = lint_text(tmp_path, case.script)
        hits = [(f.line, f.severity) for f in report.findings if f.id == rule]
        if report.unread or hits != ([(case.line, case.severity)] if case.line else []):
            wrong.append(f"{case.script}\nexpected {case.line, case.severity}, found {hits}, unread {report.unread}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("path", GOOD_FILES, ids=lambda p: p.name)
def test_good_scripts_give_nothing(path: Path) -> None:
    report = lint([path])
    assert not report.findings, [f"{f.line} {f.id}: {f.message}" for f in report.findings]
    assert not report.unread


def test_every_rule_has_cases() -> None:
    assert set(RULES) - WITH_VERSION == {case.rule for case in CASES if case.line}
    assert {case.rule for case in CASES} <= set(RULES)
    assert {rule for group in SAME_MISTAKE for rule in group} <= set(RULES)
    assert len(GOOD_FILES) >= 12


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_the_example_of_the_page_is_reported_and_its_repair_is_not(tmp_path: Path, rule: LintRule) -> None:
    version = "22.05" if rule.id in WITH_VERSION else None

    def severities(fragment: str, name: str) -> set[str]:
        return {f.severity for f in lint_text(tmp_path, script_of(fragment), name, version).findings if f.id == rule.id}

    before = severities(rule.bad, "bad.sbatch")
    assert before and not before & severities(rule.good, "good.sbatch")


def test_facts_of_a_script_decide_what_is_a_warning(tmp_path: Path) -> None:
    """Unknown is a note, and notes are not shown by default."""
    job = "#!/bin/bash\n#SBATCH -N {nodes} --gres=gpu:{gpus}\n{more}export MASTER_PORT=29500\nsrun python x.py\n"

    def severity(nodes: int, gpus: int, more: str = "") -> str | None:
        report = lint_text(tmp_path, job.format(nodes=nodes, gpus=gpus, more=more))
        return next((f.severity for f in report.findings if f.id == "fixed-port"), None)

    assert severity(1, 1, "#SBATCH --mem=32G\n") == "note", "another job may be on the node, but need not use the port"
    assert severity(2, 2, "#SBATCH --array=0-9\n") == "warning", "tasks of an array run at the same time"
    for whole in ("--exclusive", "--mem=0", "-p booster", "-C gpu\n#SBATCH -q regular"):
        assert severity(1, 1, f"#SBATCH {whole}\n") is None, whole
    assert severity(1, 8) is None
    assert severity(1, 1, "#SBATCH --exclusive=user\n#SBATCH --mem=32G\n") == "note", "the user's own jobs can be there"


def test_one_mistake_is_reported_once_per_line(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -N 2\nexport GLOO_SOCKET_IFNAME==eth0\n"
    assert found(lint_text(tmp_path, text)) == [("gloo-interface-syntax", 3)]


def test_placeholders_are_reported_once_and_silence_their_lines(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --account=<account>\n#SBATCH --nodes={{ $nodes }}\n"
    text += "export HF_TOKEN=hf_XXXXXXXXXXXXXXXXXXXXXXXX\nsrun python /path/to/x.py\n"
    report = lint_text(tmp_path, text)
    shown = [(f.id, f.line, f.severity) for f in report.findings if f.severity != "note" or f.id == "placeholder"]
    assert shown == [("placeholder", 2, "note")]
    assert "<account> (line 2), {{ $nodes }} (line 3)" in report.findings[0].message


def test_rules_in_brackets_are_ignored(tmp_path: Path) -> None:
    line = "export NCCL_P2P_DISABLE=1"
    for text in (
        f"#!/bin/bash\n# allranks: ignore[transport-disabled]\n{line}\n",
        f"#!/bin/bash\n{line}  # allranks: ignore[fixed-port, transport-disabled] copies hang\n",
        f"#!/bin/bash\n{line} # allranks: ignore[*]\n",
        f"#!/bin/bash\n# allranks: ignore-file[transport-disabled]\n\n{line}\n{line}\n",
        f"#!/bin/bash\n# allranks: allow transport-disabled copy test failed on gpu07, ACS is on\n{line}\n",
    ):
        report = lint_text(tmp_path, text)
        assert not report.findings and {f.id for f in report.allowed} == {"transport-disabled"}, text
    bare = f"#!/bin/bash\n{line}  # allranks: allow transport-disabled\n{line}  # allranks: ignore[fixed-port]\n"
    assert found(lint_text(tmp_path, bare)) == [("transport-disabled", 2), ("transport-disabled", 3)]
    directive = "#!/bin/bash\n#SBATCH --nodes=$N # allranks: ignore[variable-in-directive]\nls\n"
    assert not lint_text(tmp_path, directive).findings


@pytest.mark.parametrize(
    ("version", "more", "expected"),
    [(None, "", 0), ("22.05", "", 1), ("22.05", "mkdir -p logs\n", 1), ("23.02", "", 0), ("24.11.5", "", 0)],
)
def test_slurm_makes_folders_of_logs_since_23_02(version: str | None, more: str, expected: int, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=1:00:00\n#SBATCH --output=logs/%j.out\n{more}python -u train.py\n"
    assert [f.id for f in lint_text(tmp_path, text, slurm_version=version).findings].count("output-folder") == expected
    (tmp_path / "logs").mkdir()
    assert more or "output-folder" not in [i for i, _ in found(lint_text(tmp_path, text, slurm_version=version))]
