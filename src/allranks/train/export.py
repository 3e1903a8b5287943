"""Run the parts of an export that need torch: ``python -m allranks.train.export merge|prove SOURCE TARGET BASE
QUANTIZE``.

``merge`` writes base and adapter as one model. ``prove`` compares the logits of the export with those of the
checkpoint, both read from their files, and prints the largest difference divided by the largest logit. QUANTIZE is
``model.quantize`` of the run: the base then has the values with which the ranks computed, in float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError, CheckpointError, EnvironmentNotAble
from allranks.spec.records import QUANTIZE_NONE
from allranks.train.patches import import_no_deepspeed_to_save
from allranks.utils.machine import run_short_process

TOKENS = 32
LOGIT_LIMITS = {"float32": 1e-4}  # of other dtypes 3e-2: merging rounds each weight once; other copies must be equal


def load(folder: Path, base: str, *, dtype: Any = "auto", labels: int = 0, quantize: str = QUANTIZE_NONE) -> Any:
    """Load the model of a folder on the CPU: an adapter on its base, or a full model.

    Args:
        labels: classes of a classifier whose base has no head for them yet; 0 for all other models.
        quantize: give an adapter's base the values of a quantised one, in float32.

    Raises:
        EnvironmentNotAble, CheckpointError: the base model, or the folder, cannot be loaded.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    from allranks.train.models.quantized_base import round_to_quantized

    adapted = (folder / "adapter_config.json").is_file()
    problem: AllranksError = CheckpointError(f"{folder}: cannot be loaded as a model")
    if adapted:
        problem = EnvironmentNotAble(f"the base model {base} cannot be loaded")
    try:
        model = _load_whole_model(base if adapted else str(folder), dtype, labels)
        if not adapted:
            return model
        problem = CheckpointError(f"{folder}: the adapter does not fit the base model {base}")
        if quantize != QUANTIZE_NONE:
            round_to_quantized(model.float(), quantize)
        return PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise type(problem)(f"{problem}: {(str(error) or repr(error)).splitlines()[0]}") from None


def _load_whole_model(name: str, dtype: Any, labels: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    wanted = (AutoConfig.from_pretrained(name).architectures or [""])[0]
    classifier = labels or "SequenceClassification" in wanted
    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    heads = {"num_labels": labels} if labels else {}
    return kind.from_pretrained(name, dtype=dtype, use_safetensors=True, **heads)


def merge(source: Path, target: Path, base: str, quantize: str) -> str:
    """Write base and adapter as one model, and its tokenizer."""
    merged = load(source, base, quantize=quantize).merge_and_unload(safe_merge=True)
    if quantize != QUANTIZE_NONE:
        merged = merged.to(merged.config.dtype)  # of the files; it was merged in float32
    import_no_deepspeed_to_save()
    merged.save_pretrained(str(target))
    for path in source.iterdir():
        if path.is_file() and path.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy2(path, target / path.name)
    return "merged"


def verify_logits(source: Path, target: Path, base: str, quantize: str) -> str:
    """Compare the logits of both on the same tokens.

    Raises:
        CheckpointError: they differ by more than the rounding of a merge.
    """
    import torch

    wanted, exported = (load(folder, base, quantize=quantize) for folder in (source, target))
    wanted.eval()
    exported.eval()
    size = wanted.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(2 * TOKENS) * 7919 % size).view(2, TOKENS)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        a, b = (m(input_ids=ids, attention_mask=mask).logits.float() for m in (wanted, exported))
    difference = float((a - b).abs().max() / a.abs().max().clamp_min(1e-6))
    dtype = str(next(wanted.parameters()).dtype).removeprefix("torch.")
    merged = (source / "adapter_config.json").is_file() and not (target / "adapter_config.json").is_file()
    limit = LOGIT_LIMITS.get(dtype, 3e-2) if merged else 0.0
    if not difference <= limit:
        raise CheckpointError(
            f"{target}: its logits differ from the checkpoint's by {difference:.1e} of the largest (limit "
            f"{limit:.0e}); nothing was published"
        )
    return json.dumps(difference)


def main() -> int:
    """Run as the entry point of a new process."""
    what, source, target, base, quantize = sys.argv[1:6]
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        answer = {"merge": merge, "prove": verify_logits}[what](Path(source), Path(target), base, quantize)
    except ImportError as error:
        sys.stderr.write(
            f"torch, transformers and peft are needed to export ({error}): pip install 'allranks[train]'\n"
        )
        return EnvironmentNotAble.exit_code
    except AllranksError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{answer}\n")
    return 0


if __name__ == "__main__":
    run_short_process(main)
