"""Rules for the settings of training programs and servers: refused values, options without a value, and arrays of options."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON, Option
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.conditions import FIRST_WHY
from allranks.analysis.lint.rules.options import TRUE
from allranks.utils.text import lazy_regex

# ----------------------------------------------------------------------------------- refused values

BEST_WHY = "transformers' Trainer checks this before it starts, and stops with 'requires the save and eval strategy to match' or '... round multiple'."
RATIO_WHY = "transformers' TrainingArguments stop with 'warmup_ratio must lie in range [0,1]'."
SHARE_WHY = "vLLM takes a part of the GPU's memory, and stops with an error about the value."


def refused_settings(job: JobDescription) -> Iterator[Violation]:
    """Report settings of transformers' Trainer and of vLLM with which they do not start."""
    for call in job.work_calls:
        found = _literal_settings(call)
        best = found.get("load_best_model_at_end")
        if best and TRUE.fullmatch(best.plain_value):
            yield from _best_model(found, best)
        ratio = found.get("warmup_ratio")
        if ratio and "per_device_train_batch_size" in found and _fraction(ratio.plain_value) > 1:
            text = f"--warmup_ratio {ratio.plain_value}: it is a part of all steps"
            yield Violation(ratio.arg.offset, text, why=RATIO_WHY, cure="--warmup_steps <n>; or a ratio from 0 to 1")
    for call in job.calls:
        share = _literal_settings(call).get("gpu_memory_utilization") if _is_vllm(call) else None
        if share and _fraction(share.plain_value) > 1:
            text = f"{share.written} {share.plain_value}: it is a part, from 0 to 1"
            yield Violation(share.arg.offset, text, why=SHARE_WHY, cure=f"{share.written} 0.9")


def _best_model(found: dict[str, Option], best: Option) -> Iterator[Violation]:
    evaluates = found.get("eval_strategy") or found.get("evaluation_strategy")
    saves = found.get("save_strategy")
    if evaluates is None or "$" in evaluates.plain_value + (saves.plain_value if saves else ""):
        return  # the program may have a default of its own
    saved = saves.plain_value if saves else "steps"
    if saved not in (evaluates.plain_value, "best"):
        text = f"--load_best_model_at_end with {evaluates.written} {evaluates.plain_value} and --save_strategy {saved}{'' if saves else ', the default'}"
        yield Violation(best.arg.offset, text, why=BEST_WHY, cure=f"--save_strategy {evaluates.plain_value}")
        return
    steps = [found[n].plain_value if n in found else "" for n in ("save_steps", "eval_steps")]
    if saved == "steps" and all(re.fullmatch(r"[1-9]\d{0,7}", n) for n in steps) and int(steps[0]) % int(steps[1]):
        text = f"--load_best_model_at_end with --save_steps {steps[0]}, which is no multiple of --eval_steps {steps[1]}"
        yield Violation(best.arg.offset, text, why=BEST_WHY, cure=f"--save_steps {steps[1]}")


def _literal_settings(call: ProgramCall) -> dict[str, Option]:
    """Return the options with two dashes of a program, with underscores; the last of a name counts."""
    found: dict[str, Option] = {}
    for arg, following in call.pairs():
        if arg.text.startswith("--"):
            name, equals, value = arg.text[2:].partition("=")
            text = value if equals else following.text if following and not following.text.startswith("--") else ""
            found[name.replace("-", "_")] = Option(text, arg)
    return found


def _fraction(text: str) -> float:
    return float(text) if re.fullmatch(r"\d{1,6}(?:\.\d{0,6})?", text) else 0.0


def _is_vllm(call: ProgramCall) -> bool:
    return call.program == "vllm" or any(a.text.startswith("vllm.entrypoints") for a in call.args[:4])


# --------------------------------------------------------------------------------- arrays of options

ONE_ARGUMENT_WHY = (
    "In quotes [*] joins the elements with blanks: the program gets one argument, and knows no such option."
)
NO_ARGUMENTS = {
    "echo",
    "printf",
    "[",
    "[[",
    "test",
    "read",
    "declare",
    "local",
    "readonly",
    "typeset",
    "unset",
    "for",
    "case",
    "logger",
    "?",
}


def array_of_options(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun python train.py $ARGS`` and ``"${ARGS[*]}"`` of an array that contains options."""
    said: set[str] = set()
    for use in job.uses if "zsh" not in job.lines.line(1) else ():
        items = job.by_name.get(use.name, [])
        if use.name in said | job.reading.named or use.program in NO_ARGUMENTS or use.operator or use.under:
            continue
        if not items or items[0].offset > use.offset or any(a.items is None for a in items):
            continue
        if not any(_has_options(a) for a in items):
            continue
        before = job.text[max(0, use.offset - 4) : use.offset]
        if use.index == "[*]":
            if not (PYTHON.match(use.program) or use.program in LAUNCHERS):
                continue  # bash -c "${COMMAND[*]}"
            alone = re.fullmatch(r"\s\"\$\{", before) and re.match(r"\w+\[\*\]\}\"(?:\s|\Z)", job.text[use.offset :])
            why, text = ONE_ARGUMENT_WHY, f'"${{{use.name}[*]}}" is one argument, with all options of the array'
        else:
            alone = not use.index and before[-1:] not in "#!"
            why, text = FIRST_WHY, f"${use.name} is only the first element of the array"
        if alone:
            said.add(use.name)
            yield Violation(use.offset, text, why=why, cure=f'"${{{use.name}[@]}}"')


def _has_options(item: Assignment) -> bool:
    texts = [part.text for part in item.items or ()]
    return len(texts) > 1 and sum(t.startswith("-") for t in texts) * 3 >= len(texts)


# -------------------------------------------------------------------------- options without a value

NO_VALUE_WHY = "The program stops with 'expected one argument'; or an option that may stand alone gets no value."
WITH_VALUE = lazy_regex(
    r"--(?:lr|learning[-_]rate|(?:(?:train|eval|test|val|global|micro|per[-_](?:device|gpu)[-_](?:train|eval))[-_])?batch[-_]size|"
    r"(?:num[-_](?:train[-_])?)?epochs|output[-_](?:dir|path)|model[-_](?:path|name(?:[-_]or[-_]path)?)|data[-_](?:dir|path)|"
    r"(?:checkpoint|ckpt)[-_]path|weight[-_]decay|max[-_](?:steps|seq[-_]length))"
)


def without_value(job: JobDescription) -> Iterator[Violation]:
    """Report an option whose value is missing: one that needs a number or a path, or one whose variable nothing uses."""
    for call in job.work_calls:
        for arg, following in call.pairs():
            name = arg.text.removeprefix("--").replace("-", "_")
            if not arg.text.startswith("--") or "=" in arg.text or arg.quoted or not re.fullmatch(r"\w+", name):
                continue
            if following is None or not re.match(r"--[a-z]", following.text) or following.quoted:
                continue
            own = next((n for n in (name, name.upper()) if n in job.by_name), None)
            lost = own is not None and own not in job.used_names | job.reading.exported
            lost = lost and not any(a.exported for a in job.by_name.get(own or "", ()))
            if lost or WITH_VALUE.fullmatch(arg.text):
                text = f"{arg.text} has no value: {following.text.partition('=')[0]} follows"
                yield Violation(arg.offset, text, why=NO_VALUE_WHY, cure=f"{arg.text} ${own}" if lost else f"{arg.text} <value>")  # fmt: skip
                return
