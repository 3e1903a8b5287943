"""Describe models without torch: tested and refused architectures, and the models that allranks builds itself, ``mlp:``
and ``tiny:``.

``tested`` of model_types.json is the table of docs/models.md; a test trains, saves and reloads a small model of each.
What is refused was measured with small models of each type of transformers 5.23: two rows in one sequence must give the
logits of the rows alone, every weight of the default adapter must get a gradient, and a saved adapter must give the
same logits in plain PEFT.

``tiny:<family>`` is a small model with random weights, built from the family's config; nothing is downloaded.
``mlp:<width>x<layers>`` is a multilayer perceptron in one of two shapes (``model.config: {shape: ..., expansion: 4}``):

``blocks``  `layers` times width -> expansion x width -> width, with a GELU inside each pair and none between pairs
(default). ``wide``    `layers` linear layers; the inner ones are expansion x width wide, with a GELU between any two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from allranks.errors import SpecError
from allranks.spec.records import AdapterSpec, RunSpec
from allranks.utils.text import did_you_mean, nearest_file_hint


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A tested model type.

    ``attention``: a ``model.attention`` that it has; ``targets``: working ``adapter.targets``, None: all linear layers.
    """

    model_type: str
    task: Literal["text", "classification"] = "text"
    attention: str = "sdpa"
    targets: tuple[str, ...] | None = None
    examples: str = ""


class AdapterLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that LoRA cannot adapt in a model type, with the reason, and targets that work."""

    refused: frozenset[str]
    works: tuple[str, ...]
    why: str


class ModelTypes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of transformers' model types: model_types.json."""

    tested: tuple[Architecture, ...]
    """Language models first, then encoders, which are trained as classifiers."""
    state_across_rows: frozenset[str]
    """Types with a state or a convolution that continues from one packed row to the next."""
    attention_across_rows: frozenset[str]
    """Types whose implementation in transformers does not separate packed rows by their position ids."""
    multimodal: frozenset[str]
    """Types of transformers' causal language models that also read or write images or audio."""
    encoder_decoders: frozenset[str]
    """Types that are encoder-decoders where their config does not say otherwise."""
    absolute_positions: frozenset[str]
    """Types with a table of positions. A longer sequence has no entry in it; rotary positions have no such limit."""
    offset_positions: frozenset[str]
    """Those whose first position is ``pad_token_id + 1``, so that 514 entries are for 512 tokens."""
    adapter_limits: dict[str, AdapterLimit]
    tiny: dict[str, dict[str, Any]]
    """Sizes of the ``tiny:`` models."""


TYPES = msgspec.json.decode((Path(__file__).parent / "model_types.json").read_bytes(), type=ModelTypes)
MULTIMODAL_KEYS = ("vision_config", "audio_config", "speech_config", "audio_encoder", "vision_tower", "img_processor")
SUPPORTED = (
    "supported are causal language models (such as llama, qwen3, mistral, gpt2) and encoders as classifiers (such as "
    "bert, roberta); the documentation lists the tested ones (models); for others run your own program with script.path"
)


def packs_rows(model_type: str) -> bool:
    """Return whether rows packed into one sequence (``data.packing: isolated``) do not influence each other."""
    return model_type not in TYPES.state_across_rows | TYPES.attention_across_rows


def is_flash_attention(attention: str) -> bool:
    """Return whether an attention implementation is flash attention, recognised as transformers does: kernels of the
    hub keep their own names, such as ``kernels-community/flash-attn2``, also where ``flash_attention_2`` was
    requested."""
    return "flash" in attention


def dense_mask_reason(model_type: str, attention: str) -> str:
    """Return why packed rows of this model type need a dense mask of the sequence length squared, or nothing if they do
    not.

    With ``sdpa``, attention is computed within each row (`train.models.packed_attention`); tests compare each type with
    single rows. transformers' flash and flex implementations have no dense mask, either.
    """
    if attention == "eager":
        return "model.attention is eager; sdpa would be computed within rows"
    entry = tested(model_type)
    within_rows = entry is not None and entry.task == "text" and entry.attention == "sdpa" and packs_rows(model_type)
    if attention == "sdpa" and not within_rows:
        return f"{model_type} is not among the model types tested without it (documentation: models)"
    return ""


def tested(model_type: Any) -> Architecture | None:
    """Return the entry of a model type, or None if it is not tested."""
    return next((entry for entry in TYPES.tested if entry.model_type == model_type), None)


def tested_settings(model_type: Any) -> str:
    """Return a clause with the settings that a tested model type needs, or nothing if the defaults are fine."""
    entry = tested(model_type)
    if entry is None:
        return ""
    needs = [f"model.attention: {entry.attention}"] if entry.attention != "sdpa" else []
    if entry.task == "text" and not packs_rows(entry.model_type):
        needs.append("data.packing: none")
    if entry.targets is not None:
        needs.append(f"with LoRA adapter.targets: [{', '.join(entry.targets)}]")
    return f" (a {model_type} is tested with {', '.join(needs)})" if needs else ""


def require_trainable(config: Mapping[str, Any], where: str) -> None:
    """Refuse an encoder-decoder, and a model that also reads or writes images or audio: nothing would train those
    parts.

    Raises:
        SpecError: with what is supported.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder", kind in TYPES.encoder_decoders):
        raise SpecError(f"{where}: a {kind} is an encoder-decoder, which allranks does not train; {SUPPORTED}")
    if kind in TYPES.multimodal or any(isinstance(config.get(key), dict) for key in MULTIMODAL_KEYS):
        text = f"{kind}_text"
        hint = f"use its language model alone ({text}); " if tested(text) else ""
        raise SpecError(
            f"{where}: a {kind} also reads or writes images or audio, which allranks does not train; {hint}{SUPPORTED}"
        )


def require_architecture(config: Mapping[str, Any], spec: RunSpec, where: str, *, classifier: bool) -> None:
    """Refuse settings under which a model type would train something else than asked for, or end in an error of PEFT.

    Raises:
        SpecError: names the model type, the key and what works.
    """
    kind = str(config.get("model_type"))
    if spec.data is not None and spec.data.packing == "isolated" and not classifier and not packs_rows(kind):
        raise SpecError(
            f"data.packing is isolated, but in {where} ({kind}) rows of one sequence would influence each other; set "
            f"data.packing: none (one row per sequence), or wrapped if rows may see each other{tested_settings(kind)}"
        )
    limit = TYPES.adapter_limits.get(kind)
    if spec.adapter.type != "lora" or limit is None or spec.adapter.target_parameters:
        return
    wanted = spec.adapter.targets
    wrong = [] if wanted is None else [name for name in wanted if name.rsplit(".", 1)[-1] in limit.refused]
    if wanted is None or wrong:
        settings = (
            "adapter.targets null adapts every linear layer"
            if wanted is None
            else f"adapter.targets names {', '.join(wrong)}"
        )
        raise SpecError(
            f"{settings}, which does not work for {where} ({kind}): {limit.why}; set adapter.targets: "
            f"[{', '.join(limit.works)}]"
        )


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config that hold the number of experts."""


def router_loss(
    wanted: float | str | bool, where: str, *, experts: bool, biased: bool, own: float | None, requested: bool
) -> tuple[float, str]:
    """Return the coefficient of the load-balancing loss, 0 for none, and a sentence on it, empty for a dense model.

    Args:
        wanted: ``model.router_aux_loss``.
        biased: the routers have a correction bias.
        own: the coefficient of the model; None if transformers computes no such loss for it.
        requested: the config sets output_router_logits.

    Raises:
        SpecError: a coefficient is asked for, and transformers computes no such loss for this model.
    """
    why = ""
    if biased:
        why = (
            "; its routers are balanced by a correction bias (e_score_correction_bias), which training leaves as it "
            "was loaded"
        )
    coefficient = 0.0 if wanted in ("auto", "off") else float(wanted)
    if coefficient and own is None:
        what = "has no load-balancing loss in transformers" if experts else "is not a mixture of experts"
        raise SpecError(f"model.router_aux_loss is {wanted:g}, but {where} {what}{why}; set auto or off")
    if own is not None and wanted == "auto" and requested:
        coefficient = own
    elif own is not None and wanted == "auto":
        why = f": config.json does not set output_router_logits; model.router_aux_loss: {own:g} would add one{why}"
    if coefficient:
        source = "config.json" if wanted == "auto" else "model.router_aux_loss"
        return coefficient, f"routers: a load-balancing loss is added, with coefficient {coefficient:g} ({source}){why}"
    return 0.0, f"routers: no load-balancing loss is added{why}" if experts else ""


def fused_parameter(target: str, dimensions: Mapping[str, int]) -> str:
    """Return advice for a target of linear layers that is a fused parameter; nothing if it is none."""
    names = [name for name, count in dimensions.items() if count > 2 and f".{name}".endswith(f".{target}")]
    own = ".".join(names[0].split(".")[-3:]) if names else ""
    return f": it is a fused parameter; set adapter.target_parameters: [{own}]" if names else ""


def require_parameters(adapter: AdapterSpec, dimensions: Mapping[str, int], where: str) -> None:
    """Refuse a target that is not one of the model's parameters, whose numbers of dimensions are given by name. PEFT
    may ignore it.

    Raises:
        SpecError: names the target and the nearest parameter, or says that the model is dense.
    """
    fused = sorted({".".join(name.split(".")[-3:]) for name, count in dimensions.items() if count > 2})
    own = (
        f"its fused parameters are named {', '.join(fused)}" if fused else "it is dense: name layers in adapter.targets"
    )
    for target in adapter.target_parameters:
        if not any(name == target or name.endswith(f".{target}") for name in dimensions):
            hint = did_you_mean(target, fused)
            raise SpecError(f"adapter.target_parameters: {where} has no parameter {target!r}{hint} ({own})")


def architecture_warning(model_type: Any, where: str) -> str | None:
    """Return a warning for a model type that no test covers."""
    if not isinstance(model_type, str) or tested(model_type) is not None:
        return None
    return (
        f"{where} is a {model_type}, which is not among the tested architectures (documentation: models); compare its "
        "first losses with another program's"
    )


MLP_PREFIX, NOISE_SOURCE = "mlp:", "builtin:noise"
_NAME = re.compile(r"mlp:(\d{1,6})x(\d{1,4})")


class MlpShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one ``mlp:`` model."""

    width: int
    layers: int
    shape: Literal["blocks", "wide"] = "blocks"
    expansion: int = 4

    def blocks(self) -> list[list[tuple[int, int]]]:
        """Return (inputs, outputs) of the linear layers, by block; every layer has a bias."""
        wide = self.width * self.expansion
        if self.shape == "blocks":
            return [[(self.width, wide), (wide, self.width)]] * self.layers
        ends = [self.width, *[wide] * (self.layers - 1), self.width]
        return [[pair] for pair in pairwise(ends)]

    @property
    def parameters(self) -> int:
        """Return the number of weights and biases."""
        return sum(into * out + out for block in self.blocks() for into, out in block)


def is_mlp(name: str) -> bool:
    """Return whether ``model.name`` is an ``mlp:`` model."""
    return name.startswith(MLP_PREFIX)


def mlp_shape(name: str, config: dict[str, Any]) -> MlpShape:
    """Return the sizes that ``model.name`` and ``model.config`` describe.

    Raises:
        SpecError: the name is malformed, a setting is unknown, or a size is invalid.
    """
    match = _NAME.fullmatch(name)
    if not match or 0 in (int(match[1]), int(match[2])):
        raise SpecError(f"model.name {name}: write mlp:<width>x<layers>, such as mlp:4096x6")
    known = ("shape", "expansion")
    for key in config:
        if key not in known:
            raise SpecError(f"model.config.{key}: unknown setting of {name} (known: {', '.join(known)})")
    try:
        shape = msgspec.convert({"width": int(match[1]), "layers": int(match[2]), **config}, MlpShape)
    except msgspec.ValidationError as error:
        raise SpecError(f"model.config: {error}") from None
    if shape.expansion < 1:
        raise SpecError(f"model.config.expansion is {shape.expansion}; it must be 1 or more")
    if shape.shape == "wide" and shape.layers < 2:
        raise SpecError(f"model.name {name}: shape wide needs at least 2 layers, the first and the last")
    return shape


TINY_ENCODERS = {"bert"}


def tiny_family(name: str) -> str:
    """Return the family in ``tiny:<family>``; `SpecError` if it is unknown."""
    wanted = name.removeprefix("tiny:")
    if wanted not in TYPES.tiny:
        hint = did_you_mean(wanted, TYPES.tiny, form="tiny:{}")
        raise SpecError(f"model.name: unknown model {name!r}{hint} (known: {', '.join(tiny_names())})")
    return wanted


def tiny_names() -> tuple[str, ...]:
    """Return ``tiny:<family>`` of every family."""
    return tuple(f"tiny:{family}" for family in TYPES.tiny)


def tiny_defaults(name: str) -> dict[str, Any]:
    """Return default sizes of a tiny model (vocabulary: its tokenizer's); `SpecError` if the family is unknown."""
    return dict(TYPES.tiny[tiny_family(name)])


class TaskTypes(msgspec.Struct, frozen=True):
    """The model types for which transformers has a causal language model, a masked one, a sequence classifier."""

    causal: Collection[str]
    masked: Collection[str]
    classifiers: Collection[str]


def model_task(config: Mapping[str, Any], types: TaskTypes, where: str) -> Literal["text", "classification"]:
    """Return the task of a model: the next token, or classes of sequences (encoders, masked language models).

    Args:
        config: as config.json has it.

    Raises:
        SpecError: an encoder-decoder, a model of images or audio, or neither of the two.
    """
    kind = config.get("model_type")
    require_trainable(config, where)
    wanted = str((config.get("architectures") or [""])[0])
    if "SequenceClassification" in wanted or "MaskedLM" in wanted or "ForPreTraining" in wanted:
        if kind not in types.classifiers:
            raise SpecError(f"{where}: a {kind} ({wanted}) has no sequence classifier in transformers; {SUPPORTED}")
        return "classification"
    if kind in types.masked and kind in types.classifiers and not config.get("is_decoder"):
        # bert has a causal form, too, but its attention sees the next token unless is_decoder is true
        return "classification"
    if kind in types.causal:
        return "text"
    if kind in types.classifiers:
        return "classification"
    raise SpecError(f"{where}: a {kind} is neither a causal language model nor a sequence classifier; {SUPPORTED}")


def check_model_folder(name: str) -> None:
    """Refuse a local path without a model; accept hub names."""
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not Path(name).exists():
        return
    path = Path(name).expanduser()
    if not path.is_dir():
        raise SpecError(f"model.name {name}: there is no such folder{nearest_file_hint(path)}")
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise SpecError(
            f"model.name {name}: this folder holds an adapter, not a model; merge it into its base model (allranks "
            "export RUN --merge), or name the base model"
        )
    if not (path / "config.json").is_file():
        raise SpecError(f"model.name {name}: this folder has no config.json, so it is not a model")


DEFAULT_VOCAB = 2048
