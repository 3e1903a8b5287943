"""Every entry of the catalogue is found by its own example, and by no near miss; patterns and anchors hold together."""

import csv
import re
from pathlib import Path

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.analysis.diagnose.catalogue import CATALOGUE, all_rules
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES, FACT_PATTERNS
from allranks.analysis.diagnose.patterns import FAST_BYTES, LiteralPrefilter, Pattern, find_anchors
from tests.conftest import shared
from tests.unit.diagnose_examples import HARMLESS, NEAR_MISSES, ids, of

EXAMPLES = [entry.example for entry in CATALOGUE.values()]
ENTRIES = pytest.mark.parametrize("entry", CATALOGUE.values(), ids=list(CATALOGUE))


@ENTRIES
def test_example_is_named_first(entry, tmp_path: Path) -> None:
    assert ids(of(tmp_path, entry.example))[:1] == [entry.id]


@ENTRIES
def test_near_miss_is_not_named(entry, tmp_path: Path) -> None:
    assert entry.id not in ids(of(tmp_path, NEAR_MISSES[entry.id]))


@pytest.mark.parametrize("harmless", BENIGN_MESSAGES.values(), ids=list(BENIGN_MESSAGES))
def test_harmless_example_is_no_finding(harmless, tmp_path: Path) -> None:
    found = of(tmp_path, HARMLESS[harmless.id])
    assert not found.findings
    assert [b.id for b in found.benign] == [harmless.id]


def test_every_defined_class_has_an_entry() -> None:
    told = re.findall(r"^\| `(\w+)` \|", shared("logs", "CLASSES.md").read_text(), re.MULTILINE)
    assert len(told) > 50
    assert not set(told) - set(CATALOGUE)


def test_gate_lets_through_what_the_patterns_match() -> None:
    """The anchors are there for speed only: with and without them the same rules match."""
    rules = all_rules()
    gate = LiteralPrefilter(rules)
    for line in (*EXAMPLES, *HARMLESS.values(), *NEAR_MISSES.values()):
        passed = {r.index for r in gate.candidates(line.encode())}
        matched = {r.index for r in rules if r.pattern.search(line)}
        assert not matched - passed, [rules[i].pattern.regex for i in matched - passed]


def test_many_lines_are_searched_as_each_alone() -> None:
    """Searched together, a line is held silent only if it has no anchor; also where anchors overlap or touch digits."""
    gate = LiteralPrefilter(all_rules())
    lines = [line.encode() for line in (*EXAMPLES, *NEAR_MISSES.values())]
    lines += [b"", b"quiet line 17", b"30.0s/it", b"x2failed", b"collective operation timeout", b"7TimeoutError: x"]
    for first in (lines, lines[::-1], [b"a\xff" * 9, *lines], lines * (FAST_BYTES // len(b"".join(lines)) + 2)):
        assert gate.telling(b"\n".join(first)) >= {i for i, line in enumerate(first) if gate.candidates(line)}
    assert not gate.telling(b"quiet line 17\n\nanother quiet line")
    assert not gate.telling(b"quiet line 17\n" * FAST_BYTES)
    owners = {rule.owner for rule in gate.candidates(b"[Rank 1] Watchdog caught collective operation timeout: x")}
    assert {"collective_hang", "watchdog"} <= owners


@pytest.mark.parametrize(
    ("regex", "anchors"),
    [
        (r"Host (key|name) verification failed", {"verification failed"}),
        (r"abcd?efgh|xyz", {"abc", "xyz"}),
        (r"error 802: not ready", {"not ready"}),  # digits end a literal
        (r"(watchdog|monitor) (caught|saw) .{0,9}x", {"watchdog ", "monitor "}),  # words that end
        (r"\bgid\b|memory-of\d", {"gid ", "memory of"}),
        (r"(?:process|worker) \d+.{0,30}(?:died|left)", {"died", "left"}),  # frequent words select hardly any line
        (r"stop (?:immediately)?\d|go(?:ing on){0,2} then", {"stop ", "then"}),
        (r"\w+happened|\w+ happened\(\)(?: here)?", set()),  # one alternative has no literal that begins a word
        (r"\w+ happened\(\)(?: here)?", {"happened  "}),
        (r"(?<!no )caught(?= not)(?:-?signal)? [^a-z]trap", {"caught"}),
        (r"trap[0-9_]{1,3}again+", {"again"}),
    ],
)
def test_a_match_contains_an_anchor_at_the_start_of_a_word(regex: str, anchors: set[str]) -> None:
    assert set(find_anchors(regex)) == anchors


def test_no_pattern_names_a_sample() -> None:
    """A rule that knows a host, a path or a job number of the samples would pass there and nowhere else."""
    words = {w for p in shared("logs").glob("*.log") for w in re.findall(r"\b(?:[a-z]+\d{3,}|\d{5,})\b", p.read_text())}
    words -= {"sha256"}
    everything = [p for e in CATALOGUE.values() for p in e.patterns] + [p for ps in FACT_PATTERNS.values() for p in ps]
    for pattern in everything:
        assert not set(re.findall(r"[A-Za-z]+\d{3,}|\d{5,}", pattern.regex)) & words, pattern.regex


def test_a_match_begins_a_word() -> None:
    pattern = Pattern(r"ib timeout|: late", "ib timeout|late")
    lines = ("an ib timeout", "_ib timeout, node: late", "node: late", "attrib timeout")
    assert [bool(pattern.search(line)) for line in lines] == [True, True, True, False]


# logs of real runs: the stated cause comes first, and healthy ones give nothing


def _rows() -> list[dict[str, str]]:
    with shared("logs", "INDEX.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _first(row: dict[str, str]) -> str:
    findings = diagnose([shared("logs", row["file"])]).findings
    return findings[0].id if findings else "healthy"


def test_stated_causes_come_first() -> None:
    stated = [row for row in _rows() if row["basis"] != "log-only"]
    wrong = {row["file"]: (row["id"], found) for row in stated if (found := _first(row)) != row["id"]}
    assert len(wrong) <= 0.1 * len(stated), wrong


def test_healthy_logs_give_no_finding() -> None:
    healthy = [row for row in _rows() if row["id"] == "healthy"]
    assert healthy
    assert not [row["file"] for row in healthy if _first(row) != "healthy"]
