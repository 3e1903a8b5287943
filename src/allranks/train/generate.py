"""Reply to prompts with the model of a checkpoint: ``python -m allranks.train.generate``, a process of its own.

Reads one JSON object from standard input (`Order`) and writes one JSON object a line for each prompt, in their order.
Prompts are computed one by one, so that a reply does not depend on the other prompts. The precision is that of the run.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import AllranksError, EnvironmentNotAble, RequestError
from allranks.spec.data_templates import prompt_of, row_prompt
from allranks.spec.records import QUANTIZE_NONE
from allranks.utils.machine import run_short_process


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and what to reply to.

    ``labels`` are a classifier's class numbers by label; ``positions`` is the most tokens that the model can read.
    """

    folder: str
    base: str
    template: str
    template_file: str
    labels: dict[str, int]
    max_length: int | None
    positions: int | None
    dtype: str
    quantize: str
    columns: dict[str, str | list[str]]
    prompts: list[str | dict[str, Any]]
    max_new_tokens: int
    temperature: float
    seed: int
    raw: bool
    device: str


def reply_to_all(order: Order, out: Any) -> None:
    """Write a line for each prompt. Raise `RequestError` for a prompt that is too long or does not suit the template,
    `CheckpointError` or `EnvironmentNotAble` if the model cannot be loaded."""
    import torch

    from allranks.train.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer(order.folder, None)
    prompts = [_prompt(order, given, tokenizer) for given in order.prompts]
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if order.device == "auto" else order.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentNotAble("--device cuda: torch sees no GPU on this machine; use --device cpu")
    model = _model(order, device)
    for i, (given, prompt) in enumerate(zip(order.prompts, prompts, strict=True)):
        about = {"prompt": given if isinstance(given, str) else prompt}
        about |= (
            _classes(order, model, tokenizer, prompt) if order.labels else _reply(order, model, tokenizer, prompt, i)
        )
        out.write(msgspec.json.encode(about).decode() + "\n")
        out.flush()


def _prompt(order: Order, given: str | dict[str, Any], tokenizer: Any) -> str:
    if isinstance(given, dict):
        made = row_prompt(order.template, order.template_file, order.columns, given)
    elif order.raw or order.labels:
        return given
    else:
        made = prompt_of(order.template, order.template_file, given)
    if isinstance(made, str):
        return made
    from allranks.train.data.chats import ChatWriter

    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("the tokenizer of the checkpoint has no chat template; give the whole prompt with --raw")
    messages, tools = ([{"role": "user", "content": given}], ()) if made is None else (made.messages, made.tools)
    return ChatWriter(tokenizer).prompt(messages, tools)


def _model(order: Order, device: Any) -> Any:
    """Return the model in the run's precision: trained weights as saved, autocast, a frozen base in compute dtype."""
    from allranks.train.export import load
    from allranks.train.models.adapters import is_adapted
    from allranks.train.models.lora import fuse_lora
    from allranks.train.models.precision import DTYPES, use_autocast
    from allranks.train.models.quantized_base import quantize_loaded
    from allranks.train.models.rope import use_row_lengths

    compute = DTYPES.get(order.dtype)
    quantized = order.quantize != QUANTIZE_NONE
    dtype = compute if order.base and compute and not quantized else "auto"  # weights are quantised as they are stored
    model = load(Path(order.folder), order.base, dtype=dtype, labels=len(order.labels))
    if is_adapted(model):
        fuse_lora(model)
    if quantized:
        quantize_loaded(model, order.quantize, compute)
    use_row_lengths(model)
    for parameter in model.parameters():  # as `use_autocast` expects; integers have no gradient
        parameter.requires_grad_(parameter.is_floating_point())
    if compute is not None:
        use_autocast(model, compute, device)
    return model.to(device).eval()


def _reply(order: Order, model: Any, tokenizer: Any, prompt: str, number: int) -> dict[str, Any]:
    from allranks.train.evaluation import encode_prompt, end_tokens, generate_replies

    length = len(encode_prompt(tokenizer, prompt))
    if length == 0:
        raise RequestError(f"prompt {number + 1} has no token")
    limit = order.max_new_tokens
    if order.positions is not None:
        limit = min(limit, order.positions - length)
        if limit < 1:
            raise RequestError(
                f"prompt {number + 1} has {length} tokens, but the model has {order.positions} positions; shorten it"
            )
    seed = (order.seed + number) % 2**32
    (added,) = generate_replies(
        model, tokenizer, [prompt], limit, model.device, temperature=order.temperature, seed=seed
    )
    ended = bool(added) and added[-1] in end_tokens(model, tokenizer)
    reply = tokenizer.decode(added, skip_special_tokens=True)
    return {"reply": reply, "tokens": len(added), "finish": "end" if ended else "length"}


def _classes(order: Order, model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    import torch

    ids = tokenizer(prompt, add_special_tokens=True, truncation=True, max_length=order.max_length, return_tensors="pt")
    ids = ids.to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).logits
    shares = logits.float().softmax(-1)[0].tolist()
    shares_by_label = {label: shares[number] for label, number in order.labels.items()}
    return {"labels": dict(sorted(shares_by_label.items(), key=lambda item: -item[1]))}


def main() -> int:
    """Run as the entry point of a new process."""
    out = sys.stdout
    try:
        order = msgspec.json.decode(sys.stdin.read(), type=Order)
        with contextlib.redirect_stdout(io.StringIO()):  # libraries print; the lines are read by another process
            from transformers.utils import logging

            logging.set_verbosity_error()
            reply_to_all(order, out)
    except ImportError as error:
        sys.stderr.write(f"torch, transformers and peft are needed ({error}): pip install 'allranks[train]'\n")
        return EnvironmentNotAble.exit_code
    except AllranksError as error:
        sys.stderr.write(" ".join(str(error).splitlines()) + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 1
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        sys.stderr.write(f"the model does not fit on the GPU: {str(error).splitlines()[0]}; use --device cpu\n")
        return EnvironmentNotAble.exit_code
    return 0


if __name__ == "__main__":
    run_short_process(main)
