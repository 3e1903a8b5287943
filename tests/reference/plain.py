"""Train what a spec describes in one process, in float64, with plain PyTorch, transformers and PEFT.

Nothing here imports allranks. The rules of the documentation are written a second time, and in another way where there
is one: a row is never padded or packed, and one process takes all rows of the global batch one after another.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"max_length": 512, "packing": "isolated", "mask_prompt": True, "eval_fraction": 0.05, "seed": 42},
    "train": {
        "micro_batch_size": 1, "grad_accum": 1, "lr": 5e-5, "schedule": "linear", "warmup_steps": 0,
        "weight_decay": 0.0, "max_grad_norm": 1.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Token ids; ``wanted[i]`` says whether token ``i`` is trained. A row of a classifier has a class instead."""

    ids: list[int]
    wanted: list[bool] = field(default_factory=list)
    label: int | None = None

    @property
    def targets(self) -> int:
        """Return how many tokens carry loss. The first token of a row has no predecessor that could predict it."""
        return 1 if self.label is not None else sum(self.wanted[1:])


@dataclass
class Outcome:
    """What one training gives; ``start`` and ``weights`` hold the trained parameters before and after it."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    held_out: list[float]
    tokens_real: int
    tokens_trained: int
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def setting(spec: dict[str, Any], section: str, key: str) -> Any:
    return spec.get(section, {}).get(key, DEFAULTS[section][key])


def permutation(n: int, seed: int, stream: int) -> list[int]:
    """Return the order of ``n`` raw Philox words. Stream 0 packs, 1 + e is epoch e, and 1 the held-out rows, too."""
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(n)
    return sorted(range(n), key=lambda i: int(words[i]))


def read_rows(spec: dict[str, Any], tokenizer: Any) -> tuple[list[Row], list[Row]]:
    given = complete_rows(spec["data"]["source"])
    if "source" in spec["eval"]:
        train, held = given, complete_rows(spec["eval"]["source"])
    else:
        count = max(1, round(setting(spec, "data", "eval_fraction") * len(given)))
        order = permutation(len(given), setting(spec, "data", "seed"), 1)
        held = [given[i] for i in order[:count]]
        train = [given[i] for i in range(len(given)) if i not in order[:count]]
    if "label" in train[0]:
        classes = {value: number for number, value in enumerate(sorted({row["label"] for row in train}))}
        trained, evaluated = ([labelled(row, classes, spec, tokenizer) for row in part] for part in (train, held))
        return trained, evaluated
    encoded = [answered(row, spec, tokenizer) for row in train]
    return [row for row in encoded if row.targets], [answered(row, spec, tokenizer) for row in held]


def complete_rows(file: str) -> list[dict[str, str]]:
    rows = json.loads(Path(file).read_text())
    return [row for row in rows if row["text" if "text" in row else "output"].strip()]


def answered(row: dict[str, str], spec: dict[str, Any], tokenizer: Any) -> Row:
    """Encode a row of an instruction, perhaps an input, and an output; the end-of-text token is trained, too."""
    middle = f"### Input:\n{row['input']}\n\n" if row.get("input", "").strip() else ""
    prompt = f"### Instruction:\n{row['instruction']}\n\n{middle}### Response:\n"
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    reply = [*tokenizer(row["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    if tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id:
        asked = [tokenizer.bos_token_id, *asked]
    ids = asked + reply
    whole = not setting(spec, "data", "mask_prompt")
    wanted = [whole] * len(asked) + [True] * len(reply)
    length = setting(spec, "data", "max_length")
    return Row(ids[:length], wanted[:length])


def labelled(row: dict[str, Any], classes: dict[Any, int], spec: dict[str, Any], tokenizer: Any) -> Row:
    """Encode a row of a text and its class: the text between the two special tokens, which stay if the text is cut."""
    text = tokenizer(row["text"], add_special_tokens=False)["input_ids"][: setting(spec, "data", "max_length") - 2]
    return Row([tokenizer.cls_token_id, *text, tokenizer.sep_token_id], label=classes[row["label"]])


def sequences_of(rows: list[Row], spec: dict[str, Any]) -> list[list[Row]]:
    """Return the rows of each sequence: best-fit decreasing for ``isolated``, else one row in each."""
    if rows[0].label is not None or setting(spec, "data", "packing") == "none":
        return [[row] for row in rows]
    assert setting(spec, "data", "packing") == "isolated"
    capacity = setting(spec, "data", "max_length")
    shuffled = [rows[i] for i in permutation(len(rows), setting(spec, "data", "seed"), 0)]
    packs: list[list[Row]] = []
    for row in sorted(shuffled, key=lambda row: -len(row.ids)):
        space = [capacity - sum(len(other.ids) for other in pack) for pack in packs]
        fitting = [i for i in range(len(packs)) if space[i] >= len(row.ids)]
        if fitting:
            packs[min(fitting, key=lambda i: (space[i], i))].append(row)
        else:
            packs.append([row])
    return packs


def batches(n: int, size: int, steps: int, seed: int) -> list[list[int]]:
    """Return the sequences of each step, ``size`` at a time from one stream of permutations, epoch after epoch."""
    stream: list[int] = []
    while len(stream) < size * steps:
        stream += permutation(n, seed, 1 + len(stream) // n)
    return [stream[step * size : (step + 1) * size] for step in range(steps)]


def load(folder: str, adapter: str | None = None) -> Any:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config: Any = AutoConfig.from_pretrained(folder)
    labelled = "SequenceClassification" in config.architectures[0]
    kind = AutoModelForSequenceClassification if labelled else AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(root_mean_square_norm, module)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.double()


def root_mean_square_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm in the input's dtype; that of transformers computes in float32 even for float64."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def loss_sum(model: Any, row: Row) -> torch.Tensor:
    ids = torch.tensor([row.ids])
    logits = model(input_ids=ids).logits
    if row.label is not None:
        return F.cross_entropy(logits, torch.tensor([row.label]))
    each = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    return each[torch.tensor(row.wanted[1:])].sum()


def mean_loss(model: Any, rows: list[Row]) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(float(loss_sum(model, row)) for row in rows if row.targets)
    model.train()
    return total / sum(row.targets for row in rows)


def rate(spec: dict[str, Any], step: int) -> float:
    """Return the rate of a step (from 1): the n-th of N warm-up steps takes n/N of it; the schedule ends at 0."""
    full, warm, steps = setting(spec, "train", "lr"), setting(spec, "train", "warmup_steps"), spec["train"]["max_steps"]
    if step <= warm:
        return full * step / warm
    done = (step - 1 - warm) / (steps - warm)
    shapes = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return full * shapes[setting(spec, "train", "schedule")]


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def train(spec: dict[str, Any], ranks: int, adapter: str | None = None) -> Outcome:
    """Train the spec's model as `ranks` ranks would; `adapter` is the folder of the adapter's initial weights."""
    from transformers import AutoTokenizer

    folder = spec["model"]["name"]
    model = load(folder, adapter)
    for module in model.modules() if adapter is not None else ():
        if isinstance(getattr(module, "scaling", None), dict):  # not from the file that the package wrote
            module.scaling["default"] = spec["adapter"]["alpha"] / spec["adapter"]["r"]
    rows, held = read_rows(spec, AutoTokenizer.from_pretrained(folder))
    sequences = sequences_of(rows, spec)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = setting(spec, "train", "weight_decay")
    matrices = {"params": [p for _, p in named if p.ndim > 1], "weight_decay": decay}
    others = {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, others], betas=(0.9, 0.999), eps=1e-8, foreach=False)
    size = ranks * setting(spec, "train", "micro_batch_size") * setting(spec, "train", "grad_accum")
    out = Outcome([], [], [], [mean_loss(model, held)], 0, 0, trained_weights(model), {})
    limit = setting(spec, "train", "max_grad_norm")
    steps = batches(len(sequences), size, spec["train"]["max_steps"], setting(spec, "data", "seed"))
    for step, chosen in enumerate(steps, 1):
        batch = [row for i in chosen for row in sequences[i]]
        targets = sum(row.targets for row in batch)
        total = 0.0
        for row in batch:
            loss = loss_sum(model, row) / targets
            loss.backward()
            total += float(loss.detach())
        gradients = [p.grad for _, p in named if p.grad is not None]
        norm = math.sqrt(sum(float(g.pow(2).sum()) for g in gradients))
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(spec, step)
        optimizer.step()
        optimizer.zero_grad()
        out.losses.append(total)
        out.norms.append(norm)
        out.rates.append(rate(spec, step))
        out.tokens_trained += targets
        out.tokens_real += sum(len(row.ids) for row in batch)
    out.held_out.append(mean_loss(model, held))
    out.weights = trained_weights(model)
    return out
