"""Small models of the seeds' families, built from their configs with random weights: nothing is downloaded."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from allranks.errors import SpecError

_DENSE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {**_DENSE, "sliding_window": None}),
    "llama": ("llama", _DENSE),
    "glm4_moe": (
        "glm4_moe",
        {
            **_DENSE,
            "hidden_size": 128,
            "intermediate_size": 352,
            "head_dim": 32,
            "moe_intermediate_size": 96,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bert": (
        "bert",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_position_embeddings": 512,
        },
    ),
}
ENCODERS = {"bert"}


def family(name: str) -> str:
    """The family in ``tiny:<family>``.

    Raises:
        SpecError: there is no such family.
    """
    wanted = name.removeprefix("tiny:")
    if wanted not in _FAMILIES:
        near = difflib.get_close_matches(wanted, _FAMILIES, n=1)
        hint = f"; did you mean tiny:{near[0]}?" if near else ""
        raise SpecError(
            f"model.name: there is no model {name!r}{hint} (known: {', '.join('tiny:' + f for f in _FAMILIES)})"
        )
    return wanted


def plain_values(name: str) -> dict[str, Any]:
    """The sizes of a tiny model where the spec does not say otherwise; its vocabulary is its tokenizer's.

    Raises:
        SpecError: there is no such family.
    """
    return dict(_FAMILIES[family(name)][1])


def tiny_config(name: str, overrides: dict[str, Any], tokenizer: Any, labels: int) -> Any:
    """The config of a tiny model, sized for its tokenizer.

    Raises:
        SpecError: an override that the family's config does not have.
    """
    from transformers import AutoConfig

    model_type, values = _FAMILIES[family(name)]
    plain = AutoConfig.for_model(model_type)
    for key in overrides:
        if key not in values and not hasattr(plain, key):  # some settings are no fields of the class, yet are read
            known = [*values, *(k for k in vars(plain) if not k.startswith("_"))]
            near = difflib.get_close_matches(key, known, n=1)
            raise SpecError(
                f"model.config.{key}: {model_type} has no such setting"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    values = {**values, **overrides}
    values["vocab_size"] = len(tokenizer)
    if labels:
        values["num_labels"] = labels
    try:
        return AutoConfig.for_model(
            model_type,
            **values,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"model.config: {model_type} refuses it: {str(error).splitlines()[0]}") from None


def check_folder(name: str) -> None:
    """Refuse a local path that holds no model; hub names pass."""
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not Path(name).exists():
        return
    path = Path(name).expanduser()
    if not path.is_dir():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise SpecError(
            f"model.name {name}: there is no such folder"
            + (f"; did you mean {path.with_name(near[0])}?" if near else "")
        )
    if not (path / "config.json").is_file():
        raise SpecError(f"model.name {name}: this folder holds no config.json, so no model")
