"""Check values of a spec and their combinations (adapters, ``mlp:`` models, the profiler window), and list its keys.
Pure, no torch.

Each message names the key and the allowed values.
"""

from __future__ import annotations

import ast
import math
import re
import typing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import SpecError
from allranks.spec import records
from allranks.spec.data_columns import TEMPLATE_KINDS
from allranks.spec.launchers import LAUNCHERS
from allranks.spec.models import NOISE_SOURCE, is_mlp, mlp_shape, tiny_names
from allranks.spec.records import ATTENTION_AUTO, QUANTIZE_NONE, RECOMPUTE_NONE, ProfileSpec, Record, RunSpec, TrainSpec
from allranks.spec.strategies import REGISTRY, strategy_hint
from allranks.utils.redaction import redact
from allranks.utils.text import did_you_mean

# What people write in place of a section: its most important key's value.
ATTENTIONS = (ATTENTION_AUTO, "eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4)))
MAIN_KEYS = {
    "model": "name", "data": "source", "adapter": "type", "checkpoint": "mode", "strategy": "name", "script": "path",
}  # fmt: skip
_NAME = (
    "a run name may contain only letters, digits, '.', '_' and '-', must start with a letter or digit, and have at "
    "most 100 characters"
)


_EVERY = "expected a number of steps, auto, or a time such as 600s, 10min or 2h"


def readable_error(message: str) -> str:
    """Rewrite msgspec's ``Expected `float`, got `str` - at `$.train.lr` `` as ``train.lr: expected float, got str``."""
    text, _, place = message.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".") or "spec"
    if wrong := re.match(r"Invalid enum value '?(.*?)'?$", text):
        given = wrong.group(1)
        known = known_values(key)
        return f"{key}: unknown value {given!r}{did_you_mean(given, known)} (known: {', '.join(known)})"
    text = text.replace("`", "").replace("xpected object", "xpected a section of keys")
    text = re.sub(r"\barray\b", "list", text).replace(" | null", " or null")
    if key == "name" and "regex" in text:
        text = _NAME
    if key == "checkpoint.every":
        text = _EVERY
    return f"{key}: {text[:1].lower()}{text[1:]}"


def known_values(key: str) -> tuple[str, ...]:
    """Return the words that a key can have (boolean: ``true``, ``false``); empty if any text or number is possible."""
    annotation = _annotation(key)
    words = tuple(value for value in _literals(annotation) if isinstance(value, str))
    return words or (("true", "false") if annotation is bool else ())


def _annotation(key: str) -> Any:
    """Return the annotation of a key, such as ``Literal["a", "b"] | None``; None for an unknown key."""
    annotation: Any = RunSpec
    for part in key.split("."):
        record = record_class(annotation)
        field = fields_of(record).get(part) if record else None
        annotation = field.type if field else None
    return annotation


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _literals(part)]


@cache
def fields_of(record: type[Record]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a record by their keys. msgspec evaluates all annotations at each call, which takes long."""
    return {field.encode_name: field for field in msgspec.structs.fields(record)}


@cache
def descriptions() -> dict[tuple[str, str], str]:
    """Return the text below each record field, by record and field. Python drops it, so the source is parsed."""
    texts = {}
    for record in ast.parse(Path(records.__file__).read_text("utf-8")).body:
        if not isinstance(record, ast.ClassDef):
            continue
        for field, text in pairwise(record.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[record.name, name] = " ".join(words.split())
    return texts


VARIABLE_PREFIX = "env:"
TRACKERS = ("tensorboard", "wandb", "mlflow")


def tracker_problems(spec: RunSpec) -> list[str]:
    """Return what is wrong with ``observe.trackers``."""
    own = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
    unknown = [one for one in spec.observe.trackers if one not in TRACKERS and not re.fullmatch(own, one)]
    if unknown and spec.script is None:
        near = did_you_mean(unknown[0], TRACKERS)
        known = f"known: {', '.join(TRACKERS)}, or package.module:Class"
        return [f"observe.trackers: unknown tracker {unknown[0]!r}{near} ({known})"]
    return (
        ["observe.trackers: your own script sends its metrics itself"] if spec.observe.trackers and spec.script else []
    )


def notify_problems(spec: RunSpec) -> list[str]:
    """Return what is wrong with ``observe.notify``; an address with a secret must not get into files."""
    given = spec.observe.notify
    if given is None or re.fullmatch(r"env:[A-Za-z_]\w*", given):
        return []
    if not re.match(r"https?://[^\s/]", given):
        return [f"observe.notify: expected an http(s) address or env:NAME, got {given!r}"]
    if redact(given) != given:
        return ["observe.notify: the address holds a secret; put it into an environment variable and set env:NAME"]
    return []


def record_class(annotation: Any) -> type[Record] | None:
    """Return the record class inside an annotation such as ``DataSpec | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    for part in typing.get_args(annotation):
        record = record_class(part)
        if record is not None:
            return record
    return None


def require_sections(raw: dict[str, Any], where: str) -> None:
    """Refuse a plain value in place of a section, and show the correct form.

    Raises:
        SpecError: ``model: tiny:mistral``.
    """
    problems = []
    for section, key in MAIN_KEYS.items():
        if isinstance(given := raw.get(section), str):
            hint = strategy_hint(given) if section == "strategy" and given not in REGISTRY else ""
            problems.append(f"{section}: write it as {{{key}: {given}}}{hint}")
    if problems:
        raise SpecError(f"{where}: " + "; ".join(problems))


def without_empty_sections(raw: dict[str, Any], record: type[Record] = RunSpec) -> dict[str, Any]:
    """Remove empty sections: a section whose keys are all commented out is null in YAML and means all defaults."""
    known = fields_of(record)
    out: dict[str, Any] = {}
    for key, value in raw.items():
        inner = record_class(known[key].type) if key in known else None
        if inner is None or not (value is None or isinstance(value, dict)):
            out[key] = value
        elif value is not None:
            out[key] = without_empty_sections(value, inner)
    return out


def adapter_problems(spec: RunSpec) -> list[str]:
    """Return a sentence for each contradiction."""
    options, lora = spec.strategy.options, spec.adapter.type == "lora"
    problems = []
    if lora and spec.adapter.target_parameters and spec.adapter.dropout:
        problems.append(
            f"adapter.dropout is {spec.adapter.dropout:g}, but adapter.target_parameters does not support dropout: a "
            "weight delta has no input to drop; set adapter.dropout: 0"
        )
    if options.get("adapters") == "ignored" and not lora:
        problems.append("strategy.adapters: ignored keeps adapters on every rank, and adapter.type is none")
    elif options.get("adapters") == "ignored" and options.get("offload") == "optimizer":
        problems.append(
            "strategy.offload: optimizer has nothing to keep in host memory with strategy.adapters: ignored; set "
            "adapters: sharded, or offload: all for the frozen weights"
        )
    return problems


def model_problems(spec: RunSpec) -> list[str]:
    """Return a sentence for each value of ``model`` that its type does not exclude."""
    if spec.model is None:
        return []
    attention, coefficient, problems = spec.model.attention, spec.model.router_aux_loss, []
    if coefficient is True or (isinstance(coefficient, float) and not 0 <= coefficient < math.inf):
        given = str(coefficient).lower()
        problems.append(f"model.router_aux_loss is {given}: give auto, off, or a coefficient, such as 0.01")
    if not {"/", "|"} & set(attention) and attention not in ATTENTIONS:  # with a /, it is a kernel of the hub
        hint = did_you_mean(attention, ATTENTIONS)
        problems.append(f"model.attention: unknown value {attention!r}{hint} (known: {', '.join(ATTENTIONS)})")
    if attention == ATTENTION_AUTO and spec.train.deterministic:
        problems.append(
            "model.attention is auto, which chooses by timing, but train.deterministic is true: two runs could choose "
            "kernels that round differently; name one, such as model.attention: sdpa"
        )
    if spec.model.quantize != QUANTIZE_NONE:
        problems += _quantize_problems(spec, f"model.quantize is {spec.model.quantize}")
    if spec.model.float8:
        problems += _float8_problems(spec, spec.model.quantize)
    return problems


def _quantize_problems(spec: RunSpec, given: str) -> list[str]:
    problems = []
    if spec.adapter.type == "none":
        problems.append(
            f"{given}, but adapter.type is none: weights in 4 bits cannot be trained, only adapters next to them; set "
            "adapter.type: lora, or model.quantize: none"
        )
    strategy = REGISTRY.get(spec.strategy.name)
    if strategy is not None and strategy.refuses_quantized:
        others = [name for name, info in REGISTRY.items() if not info.refuses_quantized and not info.single_process]
        problems.append(
            f"{given}, but strategy {spec.strategy.name} {strategy.refuses_quantized}; use one of {', '.join(others)}"
        )
    return problems


def _float8_problems(spec: RunSpec, quantize: str) -> list[str]:
    strategy = REGISTRY.get(spec.strategy.name)
    refused = (
        (spec.adapter.type == "none", "adapter.type is none: it is for frozen weights; set adapter.type: lora"),
        (quantize != QUANTIZE_NONE, f"model.quantize is {quantize}: a weight has one form; set one of the two"),
        (
            strategy is not None and bool(strategy.package),  # the engine of another library
            f"strategy {spec.strategy.name} has not been tested with it; use another one",
        ),
    )
    return [f"model.float8 is true, but {text}" for wrong, text in refused if wrong]


def mlp_problems(spec: RunSpec) -> list[str]:
    """Return a sentence for each contradiction."""
    if spec.model is None or spec.data is None:
        return []
    name, source = spec.model.name, spec.data.source
    if not is_mlp(name):
        return [f"data.source {NOISE_SOURCE} is for mlp: models, {name} reads text"] if source == NOISE_SOURCE else []
    problems = []
    try:
        mlp_shape(name, spec.model.config)
    except SpecError as error:
        problems.append(str(error))
    refused = (
        (source != NOISE_SOURCE, f"data.source is {source}: {name} cannot read text; set it to {NOISE_SOURCE}"),
        (spec.eval.source is not None, "eval.source: an mlp: model is evaluated on its own noise; remove it"),
        (spec.adapter.type != "none", f"adapter.type is {spec.adapter.type}: {name} supports only full training"),
        (spec.model.router_aux_loss not in ("auto", "off", False), f"model.router_aux_loss: {name} has no experts"),
        (spec.model.recomputation != RECOMPUTE_NONE, f"model.gradient_checkpointing: {name} does not support it"),
    )
    return [*problems, *(text for wrong, text in refused if wrong)]


def evaluation_problems(spec: RunSpec) -> list[str]:
    """Return a sentence per contradiction of ``eval.patience`` or ``checkpoint.keep_best`` with what they need."""
    keys = {"eval.patience": spec.eval.patience is not None, "checkpoint.keep_best": spec.checkpoint.keep_best}
    wanted = [key for key, on in keys.items() if on]
    if not wanted or spec.data is None:
        return []
    names, verb = " and ".join(wanted), "needs" if len(wanted) == 1 else "need"
    if spec.eval.source is None and spec.data.eval_fraction == 0:
        return [f"{names} {verb} held-out rows: set data.eval_fraction above 0, or eval.source"]
    if spec.eval.every is None:
        return [f"{names} {verb} evaluations during the training: set eval.every"]
    if not spec.checkpoint.keep_best:
        return []
    every = spec.eval.every
    saves = spec.checkpoint
    if saves.mode == "none":
        return ["checkpoint.keep_best is true, but checkpoint.mode is none; set it to weights_only or full"]
    problems = []
    if saves.every_steps is None or every % saves.every_steps:
        problems.append(
            f"checkpoint.keep_best needs a checkpoint at each evaluation: checkpoint.every is {saves.every or 'null'}, "
            f"eval.every is {every}; set checkpoint.every: {every}, or a divisor of it"
        )
    if spec.eval.at_end and not saves.at_end:
        problems.append(
            "checkpoint.keep_best: the evaluation at the end (eval.at_end) needs a checkpoint; set checkpoint.at_end: "
            "true, or eval.at_end: false"
        )
    return problems


def column_warnings(spec: RunSpec) -> list[str]:
    """Return warnings on ``data.columns``: columns that look swapped, or an answer that is part of the input."""
    if spec.data is None:
        return []
    columns = {role: [names] if isinstance(names, str) else names for role, names in spec.data.columns.items()}
    warnings = []
    for question, reply in (("instruction", "output"), ("prompt", "response"), ("prompt", "completion")):
        if {reply} & set(columns.get(question, [])) and {question} & set(columns.get(reply, [])):
            warnings.append(
                f"data.columns: {question} and {reply} look swapped: the model would learn to write the question"
            )
    for target in ("output", "response", "completion", "label"):
        for role, names in columns.items():
            if role != target and (shared := [name for name in names if name in columns.get(target, [])]):
                warnings.append(
                    f"data.columns: {role} and {target} both read {', '.join(shared)}: the input contains the answer"
                )
    return warnings


def training_warnings(spec: RunSpec, max_steps: int | None) -> list[str]:
    """Return warnings on values that are allowed, but hardly meant; ``max_steps`` None means not known yet."""
    if spec.script is not None or spec.data is None:
        return []
    train, saves = spec.train, spec.checkpoint
    model, warnings = spec.model, column_warnings(spec)
    if model is not None and model.config and not model.name.startswith("tiny:") and not is_mlp(model.name):
        ignored = (
            f"model.config is ignored ({', '.join(model.config)}): it is only for tiny: and mlp: models, and "
            f"{model.name} has its own config.json; remove it, or change that file"
        )
        warnings = [ignored, *warnings]
    if spec.eval.source is None and spec.data.eval_fraction > 0.5:
        warnings.append(f"data.eval_fraction: only {1 - spec.data.eval_fraction:.0%} of the rows are trained")
    if max_steps == 0:
        return warnings
    if train.lr >= HIGH_LR:
        warnings.append(f"train.lr is {train.lr:g}, which makes AdamW diverge; usual values are 1e-6 to 1e-2")
    if max_steps is not None and (text := warmup_warning(train, max_steps)):
        warnings.append(text)
    if saves.mode != "none" and not saves.at_end and _never(saves.every, max_steps):
        warnings.append("checkpoint: nothing will be saved, because at_end is false and every is not reached")
    if spec.eval.source and not spec.eval.at_end and _never(spec.eval.every, max_steps):
        warnings.append("eval: eval.source will not be used, because at_end is false and every is not reached")
    return warnings


HIGH_LR = 1.0


def warmup_warning(train: TrainSpec, steps: int) -> str | None:
    """Return a warning if the warm-up takes all of `steps`; None if it does not."""
    if not 0 < steps < train.warmup_steps:
        return None
    return (
        f"train.warmup_steps is {train.warmup_steps}, but there are only {steps} steps: the learning rate reaches "
        f"{train.lr * steps / train.warmup_steps:.3g} instead of train.lr {train.lr:g}"
    )


def batch_warning(global_batch_size: int, sequences: int) -> str | None:
    """Return a warning if one optimizer step takes more sequences than there are; None if it does not."""
    if global_batch_size <= sequences:
        return None
    return (
        f"one optimizer step takes {global_batch_size} sequences (the global batch), but there are only {sequences}: "
        f"each is trained up to {math.ceil(global_batch_size / sequences)} times in one step; reduce the batch or use "
        "more data"
    )


def _never(every: int | str | None, max_steps: int | None) -> bool:
    return every is None or (isinstance(every, int) and max_steps is not None and every > max_steps)


def window_warning(wanted: ProfileSpec, steps: int) -> str | None:
    """Return a warning if a run or attempt of this many steps is too short for the window; None if it fits."""
    first = wanted.wait + wanted.warmup
    last = first + wanted.active
    if steps >= last:
        return None
    return (
        f"observe.profile records steps {first + 1} to {last}, but there are only {steps}: the trace will have "
        f"{max(0, steps - first)} of {wanted.active} steps; reduce wait or warmup"
    )


def profile_warnings(spec: RunSpec, world_size: int, max_steps: int | None) -> list[str]:
    """Return the warnings of `plan` and `run` about the window; ``max_steps`` None means not known yet."""
    wanted = spec.observe.profile
    if wanted is None:
        return []
    if spec.script is not None:
        return ["observe.profile: your own script is not profiled, because it has its own loop"]
    warnings = []
    if max_steps is not None and (short := window_warning(wanted, max_steps)):
        warnings.append(short)
    absent = sorted(rank for rank in wanted.ranks or [] if rank >= world_size)
    if absent:
        warnings.append(
            f"observe.profile.ranks names {', '.join(map(str, absent))}, but the ranks are 0 to {world_size - 1}"
        )
    return warnings


def is_container(wanted: str | None) -> bool:
    """Return whether ``cluster.python`` is an image, which brings a Python and packages of its own."""
    return wanted is not None and (wanted.startswith("pyxis:") or wanted.endswith(".sif"))


def all_keys(record: type[Record], path: str = "") -> list[str]:
    """Return all keys below a record, sections and values, each with its full path."""
    keys: list[str] = []
    for key, field in fields_of(record).items():
        keys.append(f"{path}{key}")
        inner = record_class(field.type)
        if inner is not None:
            keys += all_keys(inner, f"{path}{key}.")
    return keys


def settable_keys() -> dict[str, tuple[str, ...]]:
    """Return all keys that ``--set`` can set, with known values: words, booleans, built-in sets and models."""
    from allranks.spec.builtin_data import BUILTIN

    names = all_keys(RunSpec)
    sections = {name.rpartition(".")[0] for name in names}
    keys = {name: known_values(name) for name in names if name not in sections and name != "strategy.options"}
    for info in REGISTRY.values():
        for option, default in info.options.items():
            words = info.choices.get(option, ("true", "false") if isinstance(default, bool) else ())
            keys[f"strategy.{option}"] = tuple(dict.fromkeys([*keys.get(f"strategy.{option}", ()), *words]))
    return keys | {
        "strategy.name": tuple(REGISTRY),
        "cluster.launcher": tuple(LAUNCHERS),
        "model.name": tiny_names(),
        "data.source": (*(f"builtin:{name}" for name in BUILTIN), NOISE_SOURCE),
        "data.template": ("auto", *TEMPLATE_KINDS),
    }
