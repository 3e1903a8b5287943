"""Rules for secrets: tokens, passwords and webhooks in the text of a script, and in what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placeholders import PLACEHOLDER
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.redaction import (
    holds_secret,
    is_secret_name,
    looks_random,
    redact_arguments,
    redact_forms,
    whole_tokens,
)
from allranks.utils.text import lazy_regex

CLEAR_TEXT_WHY = "Everybody who can read the file, its history or the job's command line has the token."
CLEAR_TEXT_CURE = "revoke it; read the token from a file that only you can read: export HF_TOKEN=$(cat ~/.hf_token), or huggingface-cli login"
PRINTED_WHY = "The job's log is often readable for the group, is copied into reports and issues, and is kept."
PRINTED_CURE = 'print only whether it is set: echo "${HF_TOKEN:+set}"'


OF_USER = lazy_regex(r"(?:^|\s)(?:-u|--user)[=\s]\d{1,9}:\d{1,9}(?=\s|$)")
"""The numbers of a user and a group, as ``docker run -u 0:0`` takes them."""


def secret(job: JobDescription) -> Iterator[Violation]:
    seen: set[int] = set()
    for hit in (*_secrets(job), *_forms(job), *_passwords(job), *_in_words(job)):
        line = job.lines.place(hit.offset)[0]
        if line not in seen:
            seen.add(line)
            yield hit


DEFAULT = lazy_regex(r"\$\{\w+:?[-=]([^{}$]+)\}")


def _secrets(job: JobDescription) -> Iterator[Violation]:
    for item in job.assignments:
        default = DEFAULT.fullmatch(item.value)
        value = default[1] if default else item.value
        if item.removed:
            continue
        if _password_in_address(value):
            yield Violation(item.offset, f"{item.name} contains a password in clear text", cure=ADDRESS_CURE)
        elif (
            "$" not in value
            and len(value) >= 8
            and not _is_no_secret(value)
            and holds_secret(item.name, OF_USER.sub("", value))
            and not _names_run(item.name, value)
        ):
            yield Violation(item.offset, f"{item.name} contains a token in clear text")
    yield from _in_comments(job)
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program in ("echo", "printf", "srun", "bash", "env"):
            shown = [a for a in call.args if redact_forms(a.text) != a.text and not _is_no_secret(a.text)]
            shown += [a for a in call.args if KEY_OF_WANDB.search(a.text)]
            if shown and call.program in ("echo", "printf"):
                yield Violation(shown[0].offset, f"the arguments of {call.program} contain a token in clear text")
            elif (
                call.program == "echo"
                and call.after == "|"
                and words
                and "$" not in words[-1]
                and (reader := _reads_password(job, call))
                and (reader == "sudo" or (len(words[-1]) > 3 and not NO_VALUE.search(words[-1])))
            ):
                yield Violation(call.offset, f"echo gives {reader} a password in clear text")
            continue
        if call.program == "sshpass" and any(re.match(r"-p[^$]+\Z", w) for w in _joined(words)):
            yield Violation(call.offset, "the arguments of sshpass contain a password in clear text")
            continue
        address = next((a for a in call.args if _password_in_address(a.text)), None)
        if address is not None:
            yield Violation(
                address.offset, f"the arguments of {call.program} contain a password in clear text", cure=ADDRESS_CURE
            )
            continue
        named = call.program in ("mysql", "docker", "podman", "psql", "redis-cli")
        for before, arg, word, shown in zip(["", *words], call.args, words, redact_arguments(words), strict=False):
            if before == "-p" and not named and redact_forms(word) == word:
                continue  # mkdir -p, and options of other programs
            if _names_run(before, word) or _names_run(word, word):
                continue
            signs_in = call.program in ("wandb", "huggingface-cli", "hf") or {"wandb", "login"} <= set(words)
            login = signs_in and re.fullmatch(r"(?:local-)?[0-9a-f]{40}|hf_\w{20,}", word)
            if (login or word != shown) and "$" not in word and not _is_no_secret(word):
                yield Violation(arg.offset, f"the arguments of {call.program} contain a token in clear text")
                break


def _forms(job: JobDescription) -> Iterator[Violation]:
    """Report tokens of a known form wherever they stand: in here-documents, in programs of another language, in comments."""
    if job.kind == "script":
        for found in whole_tokens(job.text):
            tail = found[0][-24:].lower()
            if len(set(tail)) > 7 and not re.search(r"xxx|your|example|abcdef|1234567", found[0].lower()):
                end = job.lines.place(found.end() - 1)[0]  # of machine ... login ... password on several lines
                place = found.start() if end == job.lines.place(found.start())[0] else found.end() - 1
                yield Violation(place, "a token in clear text")


NO_VALUE = lazy_regex(r"(?i)[$<{%*]|\A-|your|passw|\Asecret\Z|xxx|\.\.\.|example|changeme")


PASSWORD_NAME = lazy_regex(r"(?i)(?:\w*_)?(?:pg|db|my|sql|root|user)?(?:password|passwd)")
USUAL_PASSWORDS = lazy_regex(
    r"(?i)(?:admin|root|test|demo|user|default|none|null|empty|false|true|postgres|secret|minio)\w*|/.*|.*\.\w{3,4}"
)


def _passwords(job: JobDescription) -> Iterator[Violation]:
    """Report passwords in the options of programs that sign in."""
    for item in job.assignments:
        if item.name in ("SSHPASS", "MYSQL_PWD") and len(item.value) > 3 and not NO_VALUE.search(item.value):
            yield Violation(item.offset, f"{item.name} contains a password in clear text")
        elif PASSWORD_NAME.fullmatch(item.name) and re.fullmatch(r"(?=.*[A-Za-z])[^\s$]{6,64}", item.value):
            if not (NO_VALUE.search(item.value) or USUAL_PASSWORDS.fullmatch(item.value) or item.removed):
                yield Violation(item.offset, f"{item.name} contains a password in clear text")
    for call in job.calls:
        words = [a.text for a in call.args]
        value = None
        if call.program in ("docker", "podman", "singularity", "apptainer") and "login" in words[:2]:
            pairs = pairwise(words)
            value = next((b for a, b in pairs if a in ("-p", "--password")), None)
        elif call.program in ("mysql", "mysqldump"):
            value = next((w[2:] for w in words if re.match(r"-p[^\s-]", w)), None)
        elif call.program == "aws" and words[:2] == ["configure", "set"] and len(words) > 3 and "secret" in words[2]:
            value = words[3] if len(words[3]) >= 30 else None
        elif call.program == "ngrok" and any("authtoken" in w for w in words[:2]) and len(words[-1]) > 20:
            value = words[-1]
        if value and len(value) > 3 and not NO_VALUE.search(value):
            yield Violation(call.offset, f"the arguments of {call.program} contain a password in clear text")


def _joined(words: list[str]) -> list[str]:
    """Return the words with the value of -p glued to it."""
    return [w + words[i + 1] if w == "-p" and i + 1 < len(words) else w for i, w in enumerate(words)]


READS_PASSWORD = {
    "sudo": ("-S",),
    "kinit": (),
    "su": (),
    "docker": ("--password-stdin",),
    "podman": ("--password-stdin",),
    "openconnect": ("--passwd-on-stdin",),
}


def _reads_password(job: JobDescription, call: ProgramCall) -> str:
    """Return the program behind the pipe that reads a password, or nothing."""
    following = next((c for c in job.calls if c.offset > call.offset), None)
    if following is None or following.program not in READS_PASSWORD:
        return ""
    needed = READS_PASSWORD[following.program]
    return following.program if not needed or any(a.text in needed for a in following.args) else ""


IN_WORDS = lazy_regex(
    r"(?i)(?<![\w$.-])(?:pass(?:word|wd|code|wort)|mot de passe|contrase(?:ñ|n)a|密码|口令)[ \t]{0,3}(?::|\uff1a)[ \t]*[\"'`]?([^\s\"'`,;]{6,40})"
)


def _in_words(job: JobDescription) -> Iterator[Violation]:
    """Report passwords that a sentence tells: ``# password: ...``."""
    for found in IN_WORDS.finditer(job.text) if job.kind == "script" else ():
        value = found[1]
        telling = any(c.isdigit() for c in value) and not re.search(r"[/$<>(){}\[\]|\\]", value)
        if telling and not NO_VALUE.search(value) and not PLACEHOLDER.search(value):
            yield Violation(found.start(1), "a password in clear text")


ADDRESS_CURE = "change the password; read it from a file that only you can read, such as ~/.netrc"
ADDRESS = lazy_regex(r"[a-z][a-z0-9+]*://[^/\s:@$]+:([^/\s@$]{3,})@")
NO_PASSWORD = lazy_regex(r"(?i)<.*|.*\b(?:password|passwd|pass|pwd|token|secret|your\w*)\b.*|x{3,}|\*+|\.{3}|\[.*|\{.*")


def _password_in_address(text: str) -> bool:
    """Return whether an address holds a user and a password, as in ``http://me:1234@proxy:3128``."""
    user = re.search(r"://([^/\s@$]+)@", text)
    if user and redact_forms(user[1]) != user[1]:
        return True  # https://TOKEN@host
    found = ADDRESS.search(text)
    return found is not None and not NO_PASSWORD.fullmatch(found[1]) and not PLACEHOLDER.search(found[1])


WANDB_NAME = lazy_regex(r"(?i)\A[-\w.]*(?:wandb(?!\w*(?:key|token|api))|redis_?-?password)")
HEX_KEY = lazy_regex(r"[0-9a-f]{40}")


def _names_run(name: str, value: str) -> bool:
    """Return whether the name is that of a run or a project of W&B, whose value may look random, too."""
    return bool(WANDB_NAME.search(name)) and not HEX_KEY.fullmatch(value.rpartition("=")[2])


KEY_OF_WANDB = lazy_regex(r"(?i)wandb\b[^\n]{0,40}\blogin\b[^\n]{0,40}?\b[0-9a-f]{40}\b")
LOOKS_RANDOM = lazy_regex(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w.+/=-]{16,}")
ASSIGNED = lazy_regex(r"(?<![\w-])([A-Za-z_]\w*)=[\"']?([^\s\"';]{8,})")


def _in_comments(job: JobDescription) -> Iterator[Violation]:
    """Report tokens in comments, which leak as those in commands do."""
    for comment in job.reading.comments:
        text = comment.text
        named = any(
            m[1].isupper() and LOOKS_RANDOM.fullmatch(m[2]) and not _is_no_secret(m[2]) and holds_secret(m[1], m[2])
            for m in ASSIGNED.finditer(text)
        )
        words = (word.strip("\"'`,;()") for word in text.split())
        formed = any(redact_forms(word) != word and not _is_no_secret(word) for word in words)
        address = any(_password_in_address(word) for word in text.split())
        if named or formed or address or KEY_OF_WANDB.search(text):
            yield Violation(comment.offset, "a comment contains a token in clear text")


TRIVIAL_KEY = lazy_regex(
    r"(?i)(?:(?:sk|key|token|api|test|local|my|vllm|none|empty|fake)[-_]?){1,3}(?:abc)?[-_]?(?:1?2?3?4?5?6?7?8?9?0?|0+)"
)
"""What users give a server of their own that checks no key, or should not be open to passers-by: ``sk1234``, ``token-abc123``, ``EMPTY``."""


def _is_no_secret(value: str) -> bool:
    name, equals, rest = value.partition("=")
    text = rest if equals and rest.strip("=") and re.fullmatch(r"-{0,2}[\w.-]+", name) else value
    return bool(
        PLACEHOLDER.search(text)
        or re.search(r"(?i)your|xxx|\*\*\*|token|secret|example|changeme|dummy|bearer oracle|\.\.\.|<", text)
        or ("/" in text and not _is_base64(text))
        or len(set(text.lower())) < 6
        or TRIVIAL_KEY.fullmatch(text)
        or re.fullmatch(r"[A-Za-z]{1,12}(?: [A-Za-z]{1,12}){1,6}", text)  # words, such as: enter the key here
    )


def _is_base64(text: str) -> bool:
    """Return whether a text with a slash looks like a key, and not like a path."""
    mixed = re.search(r"[a-z]", text) and re.search(r"[A-Z]", text) and re.search(r"\d", text)
    return len(text) >= 30 and bool(mixed) and looks_random(text) and not re.search(r"[./]{2}|\.|-|_", text)


PRINTED = lazy_regex(r"(?!USE_|NO_|HAS_|PLACEHOLDER)[A-Z][A-Z0-9_]*")


def printed(job: JobDescription) -> Iterator[Violation]:
    """Report commands that write a secret to the job's log."""
    if job.kind != "script":
        return
    for call in job.calls:
        if call.in_substitution or call.redirects or call.is_piped:
            continue
        if call.program in ("echo", "printf"):
            line = job.lines.place(call.offset)[0]
            for use in job.uses:
                if use.program == call.program and job.lines.place(use.offset)[0] == line and use.offset > call.offset:
                    shown_to_user = not job.is_job and "://" in job.line_of(use.offset)  # the address of a notebook
                    if (
                        PRINTED.fullmatch(use.name)
                        and not shown_to_user
                        and is_secret_name(use.name)
                        and not use.operator
                        and job.text[use.offset : use.offset + 1] != "#"
                    ):
                        yield Violation(use.offset, f"{call.program} writes ${use.name} to the log")
                        break
        elif call.program in ("env", "printenv") and not call.args:
            own = [a for a in job.assignments if a.exported and is_secret_name(a.name) and a.offset < call.offset]
            if own:
                yield Violation(call.offset, f"{call.program} writes {own[0].name}, set in this script, to the log")


# -------------------------------------------------------------------- webhooks and keys of services

WEBHOOK = lazy_regex(
    r"https://(?:hooks\.slack\.com/services/T\w{5,}/B\w{5,}/\w{16,}|discord(?:app)?\.com/api/webhooks/\d{10,}/[\w-]{30,})"
)
SERVICE_KEY = lazy_regex(
    r"(?:KAGGLE|COMET|CLEARML|NEPTUNE|WANDB|POLYAXON|SWANLAB|LANGCHAIN|SERPAPI)_(?:API_)?(?:KEY|TOKEN)"
)
BOT = lazy_regex(r"https://api\.telegram\.org/bot(\d{8,12}:[\w-]{30,40})\b")
HOOK_CURE = "make a new address; read it from a file that only you can read"


def more_secrets(job: JobDescription) -> Iterator[Violation]:
    """Report addresses that let everybody post, keys of services, and tokens in an --export of srun."""
    for found in WEBHOOK.finditer(job.text) if "https://" in job.text else ():
        if not PLACEHOLDER.search(found[0]) and len(set(found[0][-16:].lower())) > 5:
            yield Violation(found.start(), "the address of a webhook holds its token in clear text", cure=HOOK_CURE)
    for found in BOT.finditer(job.text):
        if not PLACEHOLDER.search(found[1]) and len(set(found[1].lower())) > 10:
            yield Violation(found.start(), "the address of a bot holds its token in clear text", cure=HOOK_CURE)
    for item in job.assignments:
        if (
            SERVICE_KEY.fullmatch(item.name.upper())
            and re.fullmatch(r"[0-9a-f]{32}|[A-Za-z0-9]{25}", item.value)
            and _is_mixed(item.value)
        ):
            if not holds_secret(item.name, item.value):
                yield Violation(item.offset, f"{item.name} contains a token in clear text")
    for call in job.calls:
        for place, name, value in _passed(call):
            if (
                len(value) >= 16
                and "$" not in value
                and holds_secret(name, value)
                and _is_mixed(value)
                and not PLACEHOLDER.search(value)
            ):
                yield Violation(place, f"the arguments of {call.program} contain a token in clear text")


def _is_mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value) and len(set(value.lower())) > 7


def _passed(call: ProgramCall) -> Iterator[tuple[int, str, str]]:
    """Yield the variables that srun and sbatch pass on with --export."""
    if call.program not in ("srun", "sbatch"):
        return
    for arg, following in call.pairs():
        name, equals, value = arg.text.partition("=")
        text = value if equals else following.text if following else ""
        for part in text.split(",") if name == "--export" else ():
            key, sign, secret = part.partition("=")
            if sign:
                yield arg.offset, key, secret


# --------------------------------------------------------------------------------------- set -x

TRACED_WHY = (
    "With set -x the shell writes each command to the job's log with the values of its variables, and so the secret."
)
TRACED_CURE = "set +x above the line, and set -x behind it; or a file that the program reads itself: ~/.netrc, wandb's and huggingface_hub's own logins"


def traced(job: JobDescription) -> Iterator[Violation]:
    """Report secrets that ``set -x`` writes to the log of a job."""
    if not job.is_job:
        return
    changes = [(0, True)] if re.match(r"#!\S*sh\s+-\w*x", job.lines.line(1)) else []
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "set" and not call.under and not call.in_substitution and not call.in_function:
            on = any(re.fullmatch(r"-\w*x\w*", w) for w in words) or "-o xtrace" in " ".join(words)
            off = any(re.fullmatch(r"\+\w*x\w*", w) for w in words) or "+o xtrace" in " ".join(words)
            changes += [(call.offset, on)] if on or off else []
    if not any(on for _, on in changes):
        return
    for item in job.set_values_at_top():
        reads = re.match(r"\$\((?:cat\s|<|head\s|pass\s|vault\s|aws\s|gcloud\s|jq\s|grep\s|sed\s|awk\s)", item.value)
        if reads and is_secret_name(item.name) and item.name.isupper() and _is_on(changes, item.offset):
            text = f"set -x writes the value of {item.name} to the log"
            yield Violation(item.offset, text, why=TRACED_WHY, cure=TRACED_CURE)
            return
    for use in job.uses:
        command = use.program not in ("=", "[", "[[", "test", "echo", "printf", "export") and not use.under
        if (
            command
            and PRINTED.fullmatch(use.name)
            and is_secret_name(use.name)
            and not use.operator
            and not use.in_function
        ):
            if _is_on(changes, use.offset) and not job.in_comment(use.offset):
                text = f"set -x writes the value of ${use.name} to the log"
                yield Violation(use.offset, text, why=TRACED_WHY, cure=TRACED_CURE)
                return


def _is_on(changes: list[tuple[int, bool]], offset: int) -> bool:
    before = [on for place, on in changes if place <= offset]
    return bool(before) and before[-1]
