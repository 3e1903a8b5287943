"""Load the model's tokenizer, or train one on the data for models built from a config, and encode examples.

The result is token ids with a mask that marks the tokens that contribute to the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from allranks.errors import DataError, EnvironmentNotAble
from allranks.spec.data_templates import Example

PAD, UNK, BOS, EOS, CLS, SEP = "<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]"
DEFAULT_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For models without a chat template: base models, and those that are built from a config."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, classifier: bool) -> Any:
    """Train a byte-level BPE tokenizer on `texts`; each digit is a token of its own.

    Returns:
        A ``PreTrainedTokenizerFast`` of at most `vocab_size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNK, CLS, SEP] if classifier else [PAD, UNK, BOS, EOS]
    if vocab_size < 256 + len(special):
        raise DataError(
            f"model.config.vocab_size {vocab_size} is too small; a byte-level tokenizer needs at least {256 + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if classifier:
        ids = [(CLS, tokenizer.token_to_id(CLS)), (SEP, tokenizer.token_to_id(SEP))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{CLS} $A {SEP}", special_tokens=ids)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, cls_token=CLS, sep_token=SEP
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, bos_token=BOS, eos_token=EOS
    )
    fast.chat_template = DEFAULT_CHAT_TEMPLATE
    return fast


def load_tokenizer(name: str, revision: str | None) -> Any:
    """Load the tokenizer of a hub model or a local folder; the end-of-text token replaces a missing padding token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, ImportError) as error:
        where = "no tokenizer in this folder" if Path(name).is_dir() else "its tokenizer cannot be loaded"
        raise EnvironmentNotAble(f"model.name {name}: {where}: {first_line(error).rstrip(': ')}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def head_classes(name: str, revision: str | None) -> list[str]:
    """Return the names of the classes of a trained classifier, in their order; none if the model has no classifier yet."""
    from transformers import AutoConfig

    folder = Path(name).expanduser()
    try:
        config: Any = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentNotAble(f"model.name {name}: its config.json cannot be loaded: {first_line(error)}") from None
    if "SequenceClassification" not in (getattr(config, "architectures", None) or [""])[0]:
        return []
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of the tokenizer's definition and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{body}|{tokenizer.chat_template}|{tokenizer.special_tokens_map}".encode()).hexdigest()


Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
BATCH = 1000


@dataclass(frozen=True)
class EncodedRow:
    """One row: token ids, and 1 where the token is a target of the loss. ``label`` is the class, -1 for text."""

    ids: Ids
    mask: Mask
    label: int = -1
    cut_tokens: int = 0


def to_turns(example: Example, tokenizer: Any) -> Example:
    """Convert chat messages to text turns with the tokenizer's chat template; assistant turns are trained.

    A template may render a message differently once others follow; then only the last assistant turn is trained.

    Raises:
        DataError: the chat template refuses the messages, or its output does not show where a reply begins and ends.
    """
    if not example.messages:
        return example
    messages, tools = list(example.messages), list(example.tools) or None
    template = getattr(tokenizer, "chat_template", None) or DEFAULT_CHAT_TEMPLATE

    def render(upto: int, generation: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:upto], tools=tools, chat_template=template, tokenize=False, add_generation_prompt=generation
        )

    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= example.first_trained]
    try:
        whole = render(len(messages), False)
        for wanted in (replies, replies[-1:]):
            turns = _turns_of(whole, [(render(i, True), render(i + 1, False)) for i in wanted], tokenizer.eos_token)
            if turns is not None:
                return Example(turns=turns, answer=example.answer, row=example.row)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"{example.place}: the model's chat template refuses these messages (roles {', '.join(m['role'] for m in messages[:8])}): "
            f"{first_line(error)}; correct the row, or use a .jinja file as data.template"
        ) from None
    raise DataError(
        f"{example.place}: the assistant turns cannot be located in the output of the tokenizer's chat template; use a .jinja template"
    )


def _turns_of(whole: str, replies: list[tuple[str, str]], end: str | None) -> tuple[tuple[str, bool], ...] | None:
    """Return the text as turns; None if a reply is not a part of it.

    A reply ends with the end-of-text token, if the chat template writes one: generation stops there, so the line feed that many
    templates write after it is not trained, and is left out after the last reply.

    Args:
        replies: of each reply, the text before it, and the text up to its end.
    """
    turns: list[tuple[str, bool]] = []
    at = 0
    for before, after in replies:
        if not (whole.startswith(before) and whole.startswith(after) and at <= len(before) <= len(after)):
            return None
        reply = whole[len(before) : len(after)]
        if end and reply.rstrip().endswith(end):
            reply = reply.rstrip()
        turns += [(whole[at : len(before)], False), (reply, True)]
        at = len(before) + len(reply)
    if whole[at:].strip():
        turns.append((whole[at:], False))
    return tuple(turns)


def encode_text(
    examples: Sequence[Example], tokenizer: Any, *, max_length: int | None, mask_prompt: bool
) -> list[EncodedRow]:
    """Encode text rows to token ids.

    The full text is encoded at once, so that words at turn boundaries are split as at inference. A token is trained if any part
    of it is in a trained turn. The end-of-text token is appended and trained.

    Args:
        max_length: rows are cut to this many tokens; None does not cut.
    """
    bos, eos = _edges(tokenizer)
    rows = []
    for start in range(0, len(examples), BATCH):
        part = [to_turns(e, tokenizer) for e in examples[start : start + BATCH]]
        encoded = tokenizer(
            ["".join(text for text, _ in e.turns) for e in part],
            add_special_tokens=False,
            return_offsets_mapping=tokenizer.is_fast,
        )
        for i, example in enumerate(part):
            ids = list(encoded["input_ids"][i])
            marks = _marks(
                example, ids, encoded["offset_mapping"][i] if tokenizer.is_fast else None, tokenizer, mask_prompt
            )
            if bos is not None and (not ids or ids[0] != bos):
                ids, marks = [bos, *ids], [0, *marks]
            if not example.turns or example.turns[-1][1]:
                if ids[-1:] != [eos]:
                    ids, marks = [*ids, eos], [*marks, 1]
                else:
                    marks[-1] = 1
            rows.append(_cut(ids, marks, max_length))
    return rows


def _edges(tokenizer: Any) -> tuple[int | None, int]:
    """Return the beginning-of-text token, if this tokenizer adds one, and the end-of-text token."""
    probe = tokenizer("x")["input_ids"]
    bos = (
        tokenizer.bos_token_id if tokenizer.bos_token_id is not None and probe[:1] == [tokenizer.bos_token_id] else None
    )
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise DataError("the tokenizer has no end-of-text token, which must separate rows")
    return bos, eos


def _marks(example: Example, ids: list[int], offsets: Any, tokenizer: Any, mask_prompt: bool) -> list[int]:
    if not mask_prompt:
        return [1] * len(ids)
    if offsets is None:  # a slow tokenizer gives no offsets: count the tokens of each turn
        marks: list[int] = []
        for text, trained in example.turns:
            marks += [int(trained)] * len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return (marks + [marks[-1] if marks else 1] * len(ids))[: len(ids)]
    spans, at = [], 0
    for text, trained in example.turns:
        if trained:
            spans.append((at, at + len(text)))
        at += len(text)
    return [int(any(start < hi and end > lo for lo, hi in spans)) for start, end in offsets]


def _cut(ids: list[int], marks: list[int], max_length: int | None) -> EncodedRow:
    cut = max(0, len(ids) - max_length) if max_length is not None else 0
    keep = len(ids) - cut
    return EncodedRow(ids=np.asarray(ids[:keep], np.int32), mask=np.asarray(marks[:keep], np.uint8), cut_tokens=cut)


def encode_labelled(
    examples: Sequence[Example], tokenizer: Any, labels: dict[str, int], *, max_length: int
) -> list[EncodedRow]:
    """Encode labelled rows to token ids and class; special tokens are added, and kept when a row is cut."""
    rows = []
    for start in range(0, len(examples), BATCH):
        part = examples[start : start + BATCH]
        texts = [e.prompt for e in part]
        full = tokenizer(texts, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
        cut = tokenizer(texts, add_special_tokens=True, truncation=True, max_length=max_length)["input_ids"]
        for i, example in enumerate(part):
            assert example.label is not None
            ids = np.asarray(cut[i], np.int32)
            rows.append(
                EncodedRow(
                    ids=ids,
                    mask=np.zeros(len(ids), np.uint8),
                    label=labels[example.label],
                    cut_tokens=len(full[i]) - len(ids),
                )
            )
    return rows
