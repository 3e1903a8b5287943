"""Rules for commands whose usual result ends a script under ``set -e``, ``set -u`` and ``pipefail``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.exit_codes import is_suspended, shell_flags
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------------- results that are 1

ZERO_CURE = "NAME=0, or NAME=$((...))"
READ_WHY = "read returns 1 at the end of its input, which -d '' always reaches: with set -e the script ends here, without a message."
PIPE_WHY = (
    "SIGPIPE stops the program that writes without end when the one behind it has read enough: with pipefail the pipe then returns 141, "
    "and set -e ends the script without a message."
)
ENDLESS = lazy_regex(r"/dev/u?random\b")
LIMITED = lazy_regex(r"(?:head|dd|od|xxd|hexdump)\b")


def ends_script(job: JobDescription) -> Iterator[Violation]:
    """Report ``let x=0``, ``read -d ''`` and pipes from a source without end, where set -e is on."""
    if job.kind != "script":
        return
    errexit, pipefail = shell_flags(job)
    if not errexit:
        return
    for call in job.calls:
        if call.tested or call.after in ("||", "&&", "&") or call.before in ("||",) or call.under:
            continue
        if is_suspended(job, call.offset) or not shell_flags(job, call.offset)[0]:
            continue
        words = [a.text for a in call.args]
        if call.in_substitution or call.is_piped:
            pass
        elif call.program == "let" and words and re.fullmatch(r"\w+\s*=\s*0+", words[-1]):
            text = f"let {words[-1]} returns 1 because the value is 0, which ends the script"
            yield Violation(call.offset, text, cure=ZERO_CURE)
            return
        elif call.program == "read" and _reads_to_end(words) and call.before not in ("|", "|&"):
            text = "read -d '' returns 1 at the end of the text, which ends the script"
            yield Violation(call.offset, text, why=READ_WHY, cure="read ... || true; or NAME=$(cat <<'EOF' ...)")
            return
    if pipefail:
        yield from _endless_pipes(job)


def _reads_to_end(words: list[str]) -> bool:
    return any(
        a in ("-d", "-rd", "-ad") and b == "" for a, b in zip(words, [*words[1:], "x"], strict=True)
    ) and not any(w == "-t" for w in words)


def _endless_pipes(job: JobDescription) -> Iterator[Violation]:
    own = sorted(job.calls, key=lambda c: c.offset)
    for number, call in enumerate(own):
        if (
            not call.is_piped
            or call.before in ("|", "|&")
            or call.tested
            or is_suspended(job, call.offset)
            or not shell_flags(job, call.offset)[0]
        ):
            continue
        words = [a.text for a in call.args]
        endless = call.program == "yes" or (
            call.program in ("cat", "tr", "base64", "strings", "od", "xxd")
            and (
                any(ENDLESS.match(w) for w in words)
                or any(r.operator == "<" and ENDLESS.match(r.target) for r in call.redirects)
            )
            and not any(re.match(r"-(?:N|l|c\d)", w) for w in words if call.program in ("od", "xxd"))
        )
        end = next((c for c in own[number + 1 :] if c.before in ("|", "|&") and not c.is_piped), None)
        if (
            not endless
            or end is None
            or end.after in ("||", "&&")
            or end.tested
            or (call.program != "yes" and end.program not in ("head", "fold", "dd"))
        ):
            continue
        if end.program == "fold" or _masked(job, call):
            continue
        text = f"{call.written} is stopped by SIGPIPE: with pipefail the pipe returns 141, which ends the script"
        cure = (
            "head -c 8 /dev/urandom | base64"
            if call.program != "yes"
            else "the program's own option, such as -y; or { yes || true; } | ..."
        )
        yield Violation(call.offset, text, why=PIPE_WHY, cure=cure)
        return


def _masked(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether another command takes the place of the result: ``export X=$(...)``, ``echo $(...)``, ``$(... || true)``."""
    if not call.in_substitution:
        return False
    line = job.line_of(call.offset)
    before = line[: job.lines.place(call.offset)[1] - 1]
    return (
        not re.match(r"[ \t]*[A-Za-z_]\w*=[\"']?(?:\w|[-_.])*[\"']?(?:\$\(|`)[ \t]*\Z", before)
        or "|| true" in line
        or "||:" in line
    )


# ------------------------------------------------------------------------------ tests under set -u

TESTED_WHY = "With set -u the shell stops at a variable that is not set, also in a test: 'unbound variable'. The test never sees that it is missing."


def tested_unset(job: JobDescription) -> Iterator[Violation]:
    """Report ``[ -z "$NAME" ]`` of a variable that nothing sets, where set -u is on."""
    if job.kind != "script" or job.sources_files:
        return
    changes: list[tuple[int, bool]] = [(0, True)] if re.match(r"#!\S*sh\s+-\w*u", job.lines.line(1)) else []
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "set" and not call.under and not call.in_substitution:
            on = any(re.fullmatch(r"-\w*u\w*", w) for w in words) or "-o nounset" in " ".join(words)
            off = any(re.fullmatch(r"\+\w*u\w*", w) for w in words) or "+o nounset" in " ".join(words)
            changes += [(call.offset, on)] if on or off else []
    if not any(on for _, on in changes):
        return
    guarded = {u.name for u in job.uses if u.operator}
    for use in job.uses:
        state = [on for place, on in changes if place <= use.offset]
        earlier = any(a.offset < use.offset for a in job.by_name.get(use.name, ()))
        known = earlier or use.name in job.reading.named | job.reading.exported | guarded
        if (
            use.program not in ("[", "[[", "test")
            or use.operator
            or use.index
            or use.under
            or known
            or not state
            or not state[-1]
        ):
            continue
        if not re.fullmatch(r"[A-Za-z_]\w+", use.name) or use.name in ALWAYS_SET or use.in_function:
            continue
        if re.match(r"(?:SLURM|PBS|LSB)_(?!ARRAY)", use.name) and job.is_job:
            continue
        before = job.text[max(0, use.offset - 12) : use.offset]
        action = job.text[use.offset : use.offset + 400].split("\nfi")[0]
        ends = re.search(r"\bexit\b|\breturn\b|\busage\b", action) is not None  # it stops the script itself
        if re.search(r"-[zn][ \t]+\"?\$\{?\Z", before) and not ends:
            text = f"with set -u this test of ${use.name} stops the script if the variable is not set"
            yield Violation(use.offset, text, why=TESTED_WHY, cure=f'[ -z "${{{use.name}:-}}" ]')
            return


ALWAYS_SET = {
    "HOME",
    "USER",
    "PATH",
    "PWD",
    "SHELL",
    "HOSTNAME",
    "UID",
    "EUID",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "RANDOM",
    "OSTYPE",
    "BASH_SOURCE",
    "BASH_VERSION",
}
