"""Load the model's tokenizer, or train one on the data for models built from a config, and encode examples.

The result is token ids with a mask that marks the tokens that contribute to the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from allranks.errors import DataError, EnvironmentNotAble
from allranks.spec.data_templates import Example
from allranks.train.data.chats import DEFAULT_CHAT_TEMPLATE, ChatWriter

PAD, UNK, BOS, EOS, CLS, SEP = "<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]"


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
            f"model.config.vocab_size {vocab_size} is too small; a byte-level tokenizer needs at least "
            f"{256 + len(special)}"
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


def load_config(name: str, revision: str | None, **more: Any) -> Any:
    """Load the config of a hub model or a local folder.

    Raises:
        EnvironmentNotAble: it cannot be loaded.
    """
    from transformers import AutoConfig

    folder = Path(name).expanduser()
    try:
        return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name, revision=revision, **more)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentNotAble(
            f"model.name {name}: is not a local folder and cannot be loaded from the hub: {first_line(error)}; "
            "check the name, set HF_TOKEN for a gated model, or give a local folder"
        ) from None


def head_classes(name: str, revision: str | None) -> list[str]:
    """Return the class names of a trained classifier, in their order; none if the model has no classifier yet."""
    config = load_config(name, revision)
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
Turns = Sequence[tuple[str, bool]]
BATCH = 1000


@dataclass(frozen=True)
class EncodedRow:
    """One row: token ids, and 1 where the token is a target of the loss. ``label`` is the class, -1 for text.

    ``example`` is the position of its example: a chat may be several rows.
    """

    ids: Ids
    mask: Mask
    label: int = -1
    cut_tokens: int = 0
    example: int = -1


def encode_text(
    examples: Sequence[Example], tokenizer: Any, *, max_length: int | None, mask_prompt: bool
) -> list[EncodedRow]:
    """Encode text rows to token ids; a chat may be several rows.

    The full text is encoded at once, so that words at turn boundaries are split as at inference. A token is trained if
    any part of it is in a trained turn. The end-of-text token is appended and trained.

    Args:
        max_length: rows are cut to this many tokens; None does not cut.
    """
    prefix = prefix_tokens(tokenizer)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if eos is None:
        raise DataError("the tokenizer has no end-of-text token, which must separate rows")
    writer = ChatWriter(tokenizer)
    rows = []
    for start in range(0, len(examples), BATCH):
        part = [
            (number, row)
            for number, example in enumerate(examples[start : start + BATCH], start)
            for row in writer.rows(example, mask_prompt=mask_prompt)
        ]
        encoded = _encode([example.turns for _, example in part], tokenizer)
        for (number, example), tokens in zip(part, encoded, strict=True):
            ids, marks = tokens
            if not mask_prompt:
                marks = [1] * len(ids)
            if ids[: len(prefix)] != prefix:
                ids, marks = [*prefix, *ids], [0] * len(prefix) + marks
            if not example.turns or example.turns[-1][1]:
                if ids[-1:] != [eos]:
                    ids, marks = [*ids, eos], [*marks, 1]
                else:
                    marks[-1] = 1
            rows.append(_cut(ids, marks, max_length, number))
    return rows


def prefix_tokens(tokenizer: Any) -> list[int]:
    """Return what a tokenizer writes before a text: beginning-of-text token, others (``[gMASK] <sop>``), or nothing."""
    whole, plain = tokenizer("x")["input_ids"], tokenizer("x", add_special_tokens=False)["input_ids"]
    starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    return whole[: starts[0]] if plain and starts else []


def _encode(rows: list[Turns], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each row, and 1 for those of which any part is in a trained turn."""
    if not tokenizer.is_fast:
        yield from (_encode_without_offsets(turns, tokenizer) for turns in rows)
        return
    texts = ["".join(text for text, _ in turns) for turns in rows]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True) if rows else {"input_ids": []}
    for turns, ids, offsets in zip(rows, encoded["input_ids"], encoded.get("offset_mapping", []), strict=True):
        ends = list(accumulate(len(text) for text, _ in turns))
        spans = [(end - len(text), end) for (text, trained), end in zip(turns, ends, strict=True) if trained]
        yield list(ids), [int(any(start < hi and end > lo for lo, hi in spans)) for start, end in offsets]


def _encode_without_offsets(turns: Turns, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Encode at once if a token ends at each turn's end, else turn by turn: both show exactly what is trained."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    whole = encode("".join(text for text, _ in turns))
    upto = [encode(text) for text in accumulate(text for text, _ in turns)]
    ends = [len(ids) for ids in upto]
    if any(whole[: len(ids)] != ids for ids in upto) or ends != sorted(ends):
        parts = [encode(text) for text, _ in turns]
        whole, ends = [token for part in parts for token in part], list(accumulate(map(len, parts)))
    marks = [int(trained) for (_, trained), size in zip(turns, np.diff([0, *ends]), strict=True) for _ in range(size)]
    return whole, marks


def _cut(ids: list[int], marks: list[int], max_length: int | None, example: int) -> EncodedRow:
    cut = max(0, len(ids) - max_length) if max_length is not None else 0
    keep = len(ids) - cut
    return EncodedRow(np.asarray(ids[:keep], np.int32), np.asarray(marks[:keep], np.uint8), -1, cut, example)


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
            ids, label = np.asarray(cut[i], np.int32), labels[example.label]
            mask, lost = np.zeros(len(ids), np.uint8), len(full[i]) - len(ids)
            rows.append(EncodedRow(ids=ids, mask=mask, label=label, cut_tokens=lost, example=start + i))
    return rows
