"""Train a small model of an architecture with the code of a rank; read it back with plain transformers and PEFT."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from allranks.launch.preview import prepare
from allranks.launch.runs import create
from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.models import packs_rows, tested
from allranks.train.data.prepared import TokenSet, _map
from allranks.train.data.tokenization import train_tokenizer
from allranks.train.worker import run_rank
from tests.dist.architecture_configs import CONFIGS

STEPS = 3


def main(names: dict[str, Any]) -> None:
    import sys

    _, case, result, args = sys.argv
    Path(result).write_text(json.dumps(names[case](**json.loads(args))))


def architecture(folder: str, kind: str) -> dict[str, Any]:
    """Return what a run with adapters and one of the whole model said, and what others compute from their files."""
    root = Path(folder)
    entry = tested(kind)
    assert entry is not None
    classifier = entry.task == "classification"
    write_rows(root / "rows.json", classifier=classifier)
    model = save_small_model(root / "model", kind, classifier=classifier, attention=entry.attention)
    found: dict[str, Any] = {} if classifier else {"leak": leak(model)}
    del model
    gc.collect()
    for adapter in ("lora", "none"):
        run = trained(root, kind, adapter)
        said = [e["loss"] for e in read_events(run.events_of(0)) if e["event"] == "eval"]
        plain = plain_loss(root, run, adapter, classifier=classifier)
        found[adapter] = {"said": said, "plain": plain, **untrained(run, adapter)}
    return found


def write_rows(path: Path, *, classifier: bool) -> None:
    def row(i: int) -> dict[str, str]:
        if classifier:
            return {"text": f"{['red', 'green', 'blue'][i % 3]} word {i} " * (1 + i % 3), "label": "abc"[i % 3]}
        return {"instruction": f"Say {i}", "output": f"number {i} " + "yes " * (i % 5)}

    path.write_text(json.dumps([row(i) for i in range(40)]))


def save_small_model(folder: Path, kind: str, *, classifier: bool, attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer = train_tokenizer(["Say number yes red green blue word 0123456789"], 300, classifier=classifier)
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "vocab_size": len(tokenizer)}
    if kind in ("roberta", "xlm-roberta"):
        tokens |= {"pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, **CONFIGS[kind], **tokens, **({"num_labels": 3} if classifier else {}))
    torch.manual_seed(7)
    make: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def leak(model: Any) -> float:
    """Return how much the logits of a row change if it follows another one in its sequence, over the largest logit."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(4, 250, (1, n), generator=generator) for n in (9, 12))
    both = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    with torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits[0]
        packed = model(input_ids=both, position_ids=positions, use_cache=False).logits[0, 9:]
    return float((alone - packed).abs().max() / alone.abs().max())


def trained(root: Path, kind: str, adapter: str) -> RunDir:
    entry = tested(kind)
    assert entry is not None
    spec = parse_spec(
        {
            "name": adapter,
            "model": {"name": str(root / "model"), "attention": entry.attention},
            "data": {
                "source": str(root / "rows.json"), "max_length": 64, "eval_fraction": 0.2,
                "packing": "isolated" if packs_rows(kind) or entry.task == "classification" else "none",
            },
            "adapter": {
                "type": adapter, "r": 2,
                "targets": list(entry.targets) if entry.targets and adapter == "lora" else None,
            },
            "strategy": {"name": "single"},
            "train": {"max_steps": STEPS, "micro_batch_size": 2, "lr": 0.02, "schedule": "constant"},
            "eval": {"samples": 0},
            "cluster": {"procs_per_node": 1, "device": "cpu", "cache": str(root / "cache")},
            "run_root": str(root / "runs"),
        }
    )  # fmt: skip
    run, _ = create(prepare(spec))
    run.logs_of(1).mkdir(parents=True)
    assert run_rank(run, 1, spec) == 0
    return run


def plain_loss(root: Path, run: RunDir, adapter: str, *, classifier: bool) -> float:
    """Return the held-out loss, one row at a time, of the checkpoint in transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    make: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    folder = run.checkpoint(STEPS)
    config = {"num_labels": 3} if classifier else {}
    model = make.from_pretrained(root / "model" if adapter == "lora" else folder, dtype=torch.float32, **config)
    if adapter == "lora":
        model = PeftModel.from_pretrained(model, str(folder))
    model.eval()
    (entry,) = [path for path in (root / "cache" / "allranks" / "data").iterdir() if (path / "eval.ids.npy").exists()]
    held = _map(entry, "eval")
    sums = np.array([_row_loss(model, held, row, classifier=classifier) for row in range(len(held.labels))])
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def _row_loss(model: Any, held: TokenSet, row: int, *, classifier: bool) -> tuple[float, int]:
    part = slice(int(held.offsets[row]), int(held.offsets[row + 1]))
    ids = torch.from_numpy(held.ids[part].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double()
    if classifier:
        return float(F.cross_entropy(logits, torch.tensor(int(held.labels[row])))), 1
    wanted = torch.from_numpy(held.mask[part].astype(bool))[1:]
    return float(F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")[wanted].sum()), int(wanted.sum())


def untrained(run: RunDir, adapter: str) -> dict[str, Any]:
    """Return the adapters that the training has left as they were (their second factor starts at zero)."""
    from safetensors.torch import load_file

    if adapter == "none":
        return {}
    weights = load_file(run.checkpoint(STEPS) / "adapter_model.safetensors")
    second = {name: tensor for name, tensor in weights.items() if "lora_B" in name}
    return {"adapters": len(second), "untrained": [name for name, tensor in second.items() if not tensor.any()]}
