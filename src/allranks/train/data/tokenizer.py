"""Tokenizers: the model's own by name, or one trained on the data where the model is built from a config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allranks.errors import DataError, EnvironmentNotAble

DEFAULT_VOCAB = 2048
PAD, UNK, BOS, EOS, CLS, SEP = "<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, classifier: bool) -> Any:
    """A byte-level BPE trained on `texts`; digits stand alone, so that numbers are spelt.

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
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(name: str, revision: str | None) -> Any:
    """The tokenizer of a hub model or a local folder; a missing padding token is filled by the end-of-text token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, ImportError) as error:
        where = "no tokenizer in this folder" if Path(name).is_dir() else "its tokenizer cannot be had"
        raise EnvironmentNotAble(f"model.name {name}: {where}: {first_line(error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tokenizer_hash(tokenizer: Any) -> str:
    """What the tokenizer does, as a hash: its whole definition and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{body}|{tokenizer.chat_template}|{tokenizer.special_tokens_map}".encode()).hexdigest()
