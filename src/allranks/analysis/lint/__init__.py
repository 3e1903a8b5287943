"""Lint a user's batch or shell script, environment file or spec. Nothing is executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allranks.analysis.lint import rules as registry
from allranks.analysis.lint.files import OpenedFile, UnreadableInput, neutralise_placeholders, open_file
from allranks.analysis.lint.generated_jobs import generated_jobs
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.readers import ShellReader, read_environment, read_spec
from allranks.analysis.lint.records import LintFinding, LintReport, UnreadFile, Violation
from allranks.analysis.lint.rules import directives, launch, nodes, rendezvous, resources, storage, variables
from allranks.analysis.lint.shell_tokens import MappedText
from allranks.analysis.lint.shellcheck import general_findings
from allranks.utils.inputs import is_stdin, name_of
from allranks.utils.redaction import redact
from allranks.utils.text import lazy_regex

ALLOW = lazy_regex(r"#\s*allranks:\s*(?:allow\s+([A-Za-z0-9,-]+)\s+\S.*|(ignore|ignore-file)\[([A-Za-z0-9, *-]+)\])")
SEVERITIES = ("error", "warning", "note")
PLACEHOLDERS_MATTER = {
    "several-torchruns", "one-node-only", "node-rank-missing", "expanded-too-early", "exit-code-lost", "placeholder",
}  # fmt: skip
"""Rules about the shape of a script. Other findings on a placeholder's line are about text that is to be replaced."""
TOPICS = (variables, rendezvous, nodes, resources, launch, directives, storage)
"""Importing a topic registers its rules."""
SAME_MISTAKE = (
    ("fixed-port", "fixed-rendezvous-id"),
    ("rendezvous-id-per-node", "port-per-node"),
    ("gloo-interface-syntax", "loopback-across-nodes", "transport-disabled", "hard-coded-interface"),
    ("address-without-host", "master-address", "scontrol-in-container"),
    ("expanded-too-early", "unset-variable"),
    ("one-node-only", "several-torchruns", "node-count", "node-rank-missing", "cpus-not-inherited"),
    ("variable-in-directive", "directive-not-read"),
)
"""Rules that see one mistake from several sides: a line has only the most severe finding of a group, else the first."""
__all__ = ["LintFinding", "LintReport", "lint"]


def lint(paths: Sequence[str | Path], slurm_version: str | None = None) -> LintReport:
    """Return the findings in all files, by file and line; ``-`` is standard input.

    Files that cannot be read are in `unread`; no exception is raised for them.

    Args:
        slurm_version: such as ``23.11``; rules about one version are certain then, and notes otherwise.
    """
    findings: list[LintFinding] = []
    allowed: list[LintFinding] = []
    unread: list[UnreadFile] = []
    for path in paths:
        name = name_of(path)
        try:
            jobs, complaints = _jobs(Path(path), slurm_version)
        except UnreadableInput as problem:
            unread.append(UnreadFile(name, None, str(problem)))
            continue
        for job in jobs:
            kept, excused = _check(name, job)
            findings += [f for f in kept if f not in findings]
            allowed += excused
            complaints += [
                (job.lines.place(offset)[0], f"{what}; the rest was not read") for offset, what in job.reading.trouble
            ]
        unread += [UnreadFile(name, line, why) for line, why in dict.fromkeys(complaints)]
    return LintReport(files=[name_of(p) for p in paths], findings=findings, allowed=allowed, unread=unread)


def _jobs(path: Path, slurm_version: str | None = None) -> tuple[list[JobDescription], list[tuple[int | None, str]]]:
    """Return what the file contains: one job; for a spec its environment, and its set-up lines if there are any."""
    opened = open_file(path)
    if opened.kind == "spec":
        return _spec_jobs(path, opened), list(opened.complaints)
    if opened.kind == "environment":
        reading = read_environment(opened.text)
        if not reading.assignments:
            raise UnreadableInput("no line of this environment file is NAME=value")
    else:
        reading = ShellReader()
        text = neutralise_placeholders(opened.text)
        reading.read(MappedText(text))
    folder = None if is_stdin(path) or path.is_fifo() else path.absolute().parent
    facts = {"slurm_version": slurm_version, "folder": folder}
    jobs = [JobDescription(opened.text, opened.kind, reading, **facts)]
    for script in generated_jobs(reading):
        inner = ShellReader()
        inner.read(script)
        jobs.append(JobDescription(opened.text, "script", inner, source=script, **facts))
        # Options of a command line are read as #SBATCH lines, which are no comments of the file.
        inner.comments = [c for c in inner.comments if opened.text.startswith("#", c.offset)]
    return jobs, list(opened.complaints)


def _spec_jobs(path: Path, opened: OpenedFile) -> list[JobDescription]:
    from allranks.errors import SpecError
    from allranks.spec.loader import load_spec

    try:
        spec = load_spec(path)
    except SpecError as problem:
        raise UnreadableInput(str(problem).removeprefix(f"{path}: ")) from None
    reading, lines = read_spec(opened.text, spec)
    for line, offset in lines:
        reading.read(MappedText(line, range(offset, offset + len(line))))
    return [JobDescription(opened.text, "spec", reading, nodes=spec.cluster.nodes)]


def _check(name: str, job: JobDescription) -> tuple[list[LintFinding], list[LintFinding]]:
    findings: dict[tuple[str, int, str], LintFinding] = {}
    certain: list[LintFinding] = []
    for rule in registry.RULES.values():
        if job.kind in rule.files:
            for hit in rule.check(job):
                finding = _finding(name, job, rule, hit)
                findings.setdefault((finding.id, finding.line, finding.message), finding)
                certain += [finding] * hit.whatever_is_filled_in
    if job.kind == "script" and job.source.text == job.text and "{%" not in job.text:
        # bash names the line behind the last one where something is not closed
        last = max(1, len(job.text.splitlines()))
        for item in general_findings(neutralise_placeholders(job.text)):
            general = item._replace(line=min(item.line, last))
            quoted = redact(job.lines.line(general.line).strip())[:300]
            finding = LintFinding(
                file=name, text=quoted, **{**general._asdict(), "message": redact(general.message)[:400]}
            )
            findings.setdefault((finding.id, finding.line, finding.message), finding)
    open_lines = {job.lines.place(offset)[0] for offset, _ in job.placeholders}
    ordered = sorted(findings.values(), key=lambda f: (f.line, f.column, f.id))
    ordered = [f for f in ordered if f.line not in open_lines or f.id in PLACEHOLDERS_MATTER or f in certain]
    excuses = _excuses(job)
    excused = [f for f in ordered if excuses.get(f.line, set()) & {f.id, "*"} or excuses.get(0, set()) & {f.id, "*"}]
    return _once_per_line([f for f in ordered if f not in excused]), excused


def _once_per_line(findings: list[LintFinding]) -> list[LintFinding]:
    """Remove findings that are another side of a mistake that the same line already has."""
    kept: list[LintFinding] = []
    seen: dict[int, set[str]] = {}
    places = {rule: i for topic in SAME_MISTAKE for i, rule in enumerate(topic)}
    for finding in sorted(findings, key=lambda f: (f.line, SEVERITIES.index(f.severity), places.get(f.id, 0))):
        others = {rule for topic in SAME_MISTAKE if finding.id in topic for rule in topic} - {finding.id}
        if not others & seen.get(finding.line, set()):
            kept.append(finding)
            seen.setdefault(finding.line, set()).add(finding.id)
    return sorted(kept, key=lambda f: (f.line, f.column, f.id))


def _finding(name: str, job: JobDescription, rule: registry.LintRule, hit: Violation) -> LintFinding:
    """Return a finding without the secrets of the line that it quotes: the logs of a CI are read by many."""
    line, column = job.lines.place(hit.offset)
    return LintFinding(
        id=rule.id,
        severity=hit.severity or rule.severity,
        file=name,
        line=line,
        column=column,
        text=redact(job.lines.line(line).strip())[:300],
        message=redact(hit.message)[:400],
        why=hit.why or rule.why,
        cure=redact(hit.cure) if hit.cure else rule.cure,
        source=hit.source or rule.source,
        fix=hit.fix,
    )


def _excuses(job: JobDescription) -> dict[int, set[str]]:
    """Return the lines that a comment covers, with its rules: its own and the next one; 0 stands for the file."""
    excuses: dict[int, set[str]] = {}
    for number, line in enumerate(job.text.splitlines(), start=1):
        comment = ALLOW.search(line)
        if comment:
            rules = {rule.strip() for rule in (comment[1] or comment[3]).split(",")}
            alone = line.lstrip().startswith("#") and not line.startswith("#SBATCH")
            covered = 0 if comment[2] == "ignore-file" else number + 1 if alone else number
            excuses.setdefault(covered, set()).update(rules)
    return excuses
