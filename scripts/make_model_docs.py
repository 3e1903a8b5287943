"""Write docs/models.md from the table of tested architectures; a test checks that it is up to date. ``python scripts/make_model_docs.py``"""

from __future__ import annotations

from pathlib import Path

from allranks.spec.models import (
    ADAPTER_LIMITS,
    ATTENTION_ACROSS_ROWS,
    ENCODER_DECODERS,
    MULTIMODAL,
    STATE_ACROSS_ROWS,
    TESTED,
    Architecture,
    packs_rows,
)

HEAD = """# Models

A spec names a model of the Hugging Face hub, a local folder, or `tiny:mistral`, `tiny:llama`, `tiny:glm4_moe` and `tiny:bert`, which are built without a
download. allranks trains causal language models on text, and encoders (masked language models, sequence classifiers) as classifiers. `plan` and `run` refuse
other models, and settings that a model does not support, before any rank starts (exit code 2). For a hub model whose config is not on this machine the ranks
make these checks.

Generated from `src/allranks/spec/models.py` by `scripts/make_model_docs.py`.

## Tested architectures

For each architecture a test (`tests/dist/test_architectures.py`) plans a small model with random weights, trains its adapters and then the whole model,
saves a checkpoint, and loads it in plain transformers and PEFT. It checks that the held-out loss equals that of the run, that each adapter was trained, and
that packed rows do not influence each other unless the table requires `data.packing: none`. Versions: transformers 5.23, PEFT 0.21. `plan` warns about other
architectures; most
other decoders of transformers passed the same checks once.

"""


def row(entry: Architecture) -> str:
    """Return the row of an architecture."""
    needs = [f"`model.attention: {entry.attention}`"] if entry.attention != "sdpa" else []
    if entry.task == "text" and not packs_rows(entry.model_type):
        needs.append("`data.packing: none`")
    targets = ", ".join(f"`{name}`" for name in entry.targets) if entry.targets else "every linear layer"
    return f"| `{entry.model_type}` | {entry.examples} | {', '.join(needs) or '-'} | {targets} |"


def table(task: str) -> str:
    """Return the table of one task."""
    rows = "\n".join(row(entry) for entry in TESTED if entry.task == task)
    return f"| `model_type` | such as | settings that it needs | LoRA targets |\n|---|---|---|---|\n{rows}\n"


def names(types: frozenset[str] | set[str]) -> str:
    """Return model types as a list."""
    return ", ".join(sorted(types))


def text() -> str:
    """Return the page."""
    limits = "\n".join(
        f"| `{kind}` | {', '.join(sorted(limit.refused))} | {', '.join(limit.works)} | {limit.why} |"
        for kind, limit in ADAPTER_LIMITS.items()
    )
    return f"""{HEAD}Causal language models:

{table("text")}
Encoders, trained as classifiers (`data.template: classification`). A language model whose config names `ForSequenceClassification` is also trained as a
classifier.

{table("classification")}
## Refused

- **Encoder-decoders**: {names(ENCODER_DECODERS)}, and every config with `is_encoder_decoder`.
- **Images and audio**: {names(MULTIMODAL)}, and every config with a `vision_config` or `audio_config`. These parts would not be trained. For some there is
  a separate language model, such as `gemma3_text`.
- **Neither a causal language model nor a sequence classifier** in transformers, and masked language models without a sequence classifier.
- **Packed rows** (`data.packing: isolated`, the default) in models where one row would influence the next; set `data.packing: none`:
    - with a state or convolution that continues across rows: {names(STATE_ACROSS_ROWS)};
  - whose attention in transformers ignores row boundaries: {names(ATTENTION_ACROSS_ROWS)}.
- **LoRA targets** that do not work:

| `model_type` | refused | works | why |
|---|---|---|---|
{limits}

These lists were measured with small models of every causal type of transformers 5.23 that could be built.

## Known limits

- Mamba models are slow on CPUs, and on GPUs without the kernels that transformers uses; transformers prints a warning at the start.
- The sample answers of an evaluation are generated in batches with padding on the left, which changes the state of an RWKV model; its losses are not affected.
- For DistilBERT the first layer of the new head (`pre_classifier`) is trained in full and saved with the adapter, as PEFT does with the last layer.
"""


if __name__ == "__main__":
    Path(__file__).resolve().parent.parent.joinpath("docs", "models.md").write_text(text())
