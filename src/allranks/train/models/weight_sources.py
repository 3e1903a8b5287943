"""Map the tensors in safetensors files to the model's by transformers' rules, and read them in full or as ranges.

Names and layouts in files may differ from the model's: experts may be separate in files and one tensor in the model,
and prefixes may differ. The rules run first on tensors without content, so that names, shapes and dtypes are checked
before any weight is read.

Ranks read their own parts of the files (`DirectReads`) if all ranks see the same files, of tensors that are stored as
the model has them: rank 0 describes each file by its path, size, time of change, and a hash of its header and of
samples of its weights, and every rank compares this with what it finds under the path. If one rank finds anything
else, all ranks receive the weights from rank 0.

Bytes are read with `pread`. A mapped file would end the process with SIGBUS if it were truncated meanwhile; `pread`
returns fewer bytes, which becomes an error with the name of the file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.train.data.tokenization import first_line
from allranks.train.distributed import DistContext
from allranks.utils.inputs import open_regular
from allranks.utils.safetensors_files import MAX_HEADER, StoredTensor

OF_NAME = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAME_OF = {dtype: name for name, dtype in OF_NAME.items()}
PIECE_BYTES = 16 << 20  # read at a time: each rank has one buffer of this size
SAMPLES, SAMPLE_BYTES = 8, 4096  # of the weights in each file
CRC_POLYNOMIAL = 0xEDB88320  # of CRC-32, with reversed bits


@dataclass
class WeightConversion:
    """A rule that converts stored tensors to one or more tensors of the model."""

    first: str  # the first target name in the model
    rule: Any = None  # transformers' converter; None: no conversion
    parts: list[tuple[str, str]] = field(default_factory=list)  # (the rule's pattern, stored name), in order

    @property
    def stored(self) -> list[str]:
        """Names of the stored tensors."""
        return [name for _, name in self.parts]

    def make(self, give: Callable[[str], torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name; `give` returns the tensor of a stored name."""
        if self.rule is None:
            return {self.first: give(self.parts[0][1])}
        rule = deepcopy(self.rule)
        for pattern, name in self.parts:
            rule.add_tensor(self.first, name, pattern, lambda name=name: give(name))
        made = rule.convert(self.first, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


def remember_rules(model: Any, used: list[int]) -> None:
    """Store the indices of the rules that were used on the model: saving inverts them on every rank."""
    model._weight_conversions = [rule for i, rule in enumerate(_rules(model)) if i in used]


def _rules(model: Any) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:  # private module of transformers; other versions may not have it
        raise EnvironmentNotAble(
            f"this version of transformers lacks the conversion rules for weights: {first_line(error)}; install 5.23"
        ) from None
    return get_model_conversion_mapping(model)


def _group(
    model: Any, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Any], rules: list[Any]
) -> list[WeightConversion]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    recipes: dict[str, WeightConversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)  # type: ignore[arg-type]
        if target not in wanted:  # such as the head of another task
            continue
        rule = None if pattern is None else by_pattern[pattern]
        recipes.setdefault(target, WeightConversion(target, rule)).parts.append((pattern or name, name))
    return list(recipes.values())


def _traced(
    recipe: WeightConversion, model: Any, stored: Mapping[str, StoredTensor], name: str
) -> dict[str, torch.Tensor]:
    def give(part: str) -> torch.Tensor:
        entry = stored[part]
        return torch.empty(entry.shape, dtype=OF_NAME.get(entry.dtype, torch.uint8), device="meta")

    try:
        return recipe.make(give, model)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SpecError(
            f"model.name {name}: {stored[recipe.stored[0]].file}: {', '.join(recipe.stored[:3])} cannot be converted "
            f"to {recipe.first}: {first_line(error)[:200]}"
        ) from None


def _check_dtype(entry: StoredTensor, part: str, target: torch.dtype, name: str) -> None:
    have = OF_NAME.get(entry.dtype)
    if have is not None and have.is_floating_point == target.is_floating_point:
        return
    raise SpecError(
        f"model.name {name}: {entry.file}: {part} is {entry.dtype}, the model needs "
        f"{str(target).removeprefix('torch.')}: quantised weights cannot be trained; use a revision in F32, F16 or BF16"
    )


def dtypes_of(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return dtypes by name: `dtype`, except for modules that transformers keeps in float32."""
    kept = [p for p, d in model._get_dtype_plan(dtype).items() if d == torch.float32]
    pattern = re.compile("|".join("(?:{})".format(p.replace("*", ".*")) for p in kept)) if kept else None
    return {
        n: torch.float32 if pattern is not None and t.is_floating_point() and pattern.search(n) else t.dtype
        for n, t in model.state_dict().items()
    }


class OpenFiles:
    """Files from which bytes are read."""

    def __init__(self) -> None:
        self.descriptors: dict[Path, int] = {}
        self.read_bytes = 0

    def open(self, path: Path) -> int:
        """Return the descriptor of a file, which stays open."""
        if path not in self.descriptors:
            with open_regular(path) as stream:
                self.descriptors[path] = os.dup(stream.fileno())
        return self.descriptors[path]

    def read(self, entry: StoredTensor, name: str, first: int, into: torch.Tensor) -> None:
        """Fill a tensor with the elements of a stored tensor from index `first`.

        Raises:
            EnvironmentNotAble: the file cannot be read, or ends too early.
        """
        view, done = into.view(-1).view(torch.uint8).numpy().data, 0
        try:
            while done < len(view):
                at = entry.offset + first * into.itemsize + done
                count = os.preadv(self.open(entry.file), [view[done:]], at)
                if count == 0:
                    raise EnvironmentNotAble(
                        f"{entry.file}: {name} cannot be read: the file was truncated to {at} bytes or fewer while it "
                        "was read. Download it again"
                    )
                done += count
        except OSError as error:
            raise EnvironmentNotAble(f"{entry.file}: {name} cannot be read: {error.strerror}") from None
        self.read_bytes += len(view)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


class FileSource:
    """The tensors of a model in its files, read on demand on the CPU.

    Args:
        model: a transformers model; its tensors need no content.
        name: the model's name in the spec, for messages.

    Attributes:
        by_name: the conversion of each of the model's tensors that the files hold.
        dtypes: the dtype of each of the model's tensors.
        rules_used: indices of transformers' rules for this model that match a name in the files.

    Raises:
        SpecError: the shape of a stored tensor differs from the model's config, or its dtype cannot be trained.
    """

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, name: str) -> None:
        self.model, self._stored = model, stored
        self.folder = next(iter(stored.values())).file.parent
        self.dtypes = dtypes_of(model, dtype)
        self.by_name: dict[str, WeightConversion] = {}
        self._files = OpenFiles()
        self._made: dict[str, torch.Tensor] = {}
        wanted, rules = model.state_dict(), _rules(model)
        for recipe in _group(model, stored, wanted, rules):
            first = stored[recipe.stored[0]]
            more = f" and {len(recipe.parts) - 1} more" if len(recipe.parts) > 1 else ""
            for target, tensor in _traced(recipe, model, stored, name).items():
                if target not in wanted:
                    continue
                if tensor.shape != wanted[target].shape:
                    raise SpecError(
                        f"model.name {name}: {first.file}: {recipe.stored[0]}{more}: gives {target} the shape "
                        f"{tuple(tensor.shape)}, the model's config requires {tuple(wanted[target].shape)}: "
                        "config.json does not match the weight files"
                    )
                for part in recipe.stored:
                    _check_dtype(stored[part], part, self.dtypes[target], name)
                self.by_name[target] = recipe
        self.rules_used = [i for i, rule in enumerate(rules) if rule.was_used()]

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors that the files hold."""
        return sorted(self.by_name)

    @property
    def read_bytes(self) -> int:
        return self._files.read_bytes

    def unconverted(self) -> dict[str, StoredTensor]:
        """Return, by name, the model's tensors that are stored as they are, perhaps in another dtype."""
        return {name: self._stored[one.stored[0]] for name, one in self.by_name.items() if one.rule is None}

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor. It may be requested again: PEFT keeps a fully trained module beside its frozen original."""
        if name in self._made:
            return self._made.pop(name)
        made = self.by_name[name].make(lambda part: self._read(part, self.dtypes[name]), self.model)
        tensor = made.pop(name).to(self.dtypes[name])
        self._made |= {n: t for n, t in made.items() if n in self.by_name}
        return tensor

    def forget(self, name: str) -> None:
        """Do nothing: no tensor is kept in memory."""

    def close(self) -> None:
        self._files.close()

    def _read(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        entry = self._stored[part]
        tensor = torch.empty(entry.shape, dtype=OF_NAME[entry.dtype])
        self._files.read(entry, part, 0, tensor)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor


class ModelSource:
    """Take tensors from a model that was initialized in this process; each is freed when it is no longer needed."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
        self.read_bytes = 0

    def take(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def forget(self, name: str) -> None:
        """Free the tensor."""
        del self._tensors[name]

    def close(self) -> None:
        """Do nothing: no file is open."""


@dataclass(frozen=True)
class FileFacts:
    """A file as rank 0 sees it. ``content``: SHA-256 of its header and of samples of its weights."""

    path: Path
    size: int
    changed_ns: int
    content: str


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model, and by the model's names the tensors in them that are stored as the model has them."""

    facts: dict[Path, FileFacts]
    stored: dict[str, StoredTensor]


def describe(source: FileSource) -> WeightFiles:
    """Describe the files of a model.

    Raises:
        EnvironmentNotAble: a file cannot be read.
    """
    stored = source.unconverted()
    try:
        return WeightFiles({path: facts_of(path) for path in sorted({e.file for e in stored.values()})}, stored)
    except OSError as error:
        raise EnvironmentNotAble(f"{error.filename or source.folder}: cannot be read: {error.strerror}") from None


def agree(world: DistContext, known: WeightFiles) -> tuple[str, int]:
    """Compare the files that this rank sees with those that rank 0 has described. Collective.

    Returns:
        Why ranks see different files, empty if they do not; and the number of ranks, the first ones, on rank 0's node.
    """
    mine = next((reason for facts in known.facts.values() if (reason := difference(facts))), "")
    every: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(every, (mine, world.host), group=world.control)
    others = sum(bool(reason) for reason, _ in every) - 1
    more = f", and {others} more ranks differ from rank 0" if others > 0 else ""
    reason = next((f"rank {r} on {host} {reason}{more}" for r, (reason, host) in enumerate(every) if reason), "")
    return reason, next((r for r, (_, host) in enumerate(every) if host != every[0][1]), world.size)


def difference(known: FileFacts) -> str:
    """Return in what a file differs from its description, as the end of a sentence; empty if in nothing."""
    path = known.path
    try:
        seen = facts_of(path)
    except FileNotFoundError:
        return f"does not see {path}"
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if seen.size != known.size:
        return f"finds {seen.size} bytes in {path}, rank 0 {known.size}"
    if seen.changed_ns != known.changed_ns:
        return f"finds another time of change of {path} than rank 0"
    return "" if seen == known else f"finds other content in {path} than rank 0"


def facts_of(path: Path) -> FileFacts:
    """Look at a file; `FileFacts.content` is of its header and of samples from the first bytes to the last ones."""
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        start = stream.read(8)
        length = min(int.from_bytes(start, "little"), MAX_HEADER)
        digest = hashlib.sha256(start + stream.read(length))
        for i in range(SAMPLES):
            stream.seek(8 + length + max(status.st_size - 8 - length - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return FileFacts(path, status.st_size, status.st_mtime_ns, digest.hexdigest())


class DirectReads:
    """Read ranges of the stored tensors of a model; `dtypes` has the dtype by name to which they are converted."""

    def __init__(self, known: WeightFiles, dtypes: Mapping[str, torch.dtype]) -> None:
        self._known, self.dtypes = known, dtypes
        self._files = OpenFiles()
        self._buffer: torch.Tensor | None = None

    @property
    def read_bytes(self) -> int:
        return self._files.read_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._known.stored

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the elements from `start` to `stop` of a flattened tensor: (first, last + 1, elements), which are valid
        until the next ones are read.

        Raises:
            EnvironmentNotAble: the file cannot be read, ends too early, or was changed since the ranks compared it.
        """
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        entry = self._known.stored[name]
        dtype = OF_NAME[entry.dtype]
        step = PIECE_BYTES // dtype.itemsize
        for low in range(start, stop, step):
            if entry.file not in self._files.descriptors:
                try:
                    self._require_unchanged(entry.file, self._files.open(entry.file))
                except OSError as error:
                    raise EnvironmentNotAble(f"{entry.file}: {name} cannot be read: {error.strerror}") from None
            high = min(low + step, stop)
            raw = self._buffer[: (high - low) * dtype.itemsize].view(dtype)
            self._files.read(entry, name, low, raw)
            yield low, high, raw.to(self.dtypes[name])

    def close(self) -> None:
        """Close the open files.

        Raises:
            EnvironmentNotAble: one was changed while it was read.
        """
        try:
            for path, descriptor in self._files.descriptors.items():
                self._require_unchanged(path, descriptor)
        finally:
            self._files.close()

    def _require_unchanged(self, path: Path, descriptor: int) -> None:
        known, status = self._known.facts[path], os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (known.size, known.changed_ns):
            raise EnvironmentNotAble(
                f"{path}: was changed while the model was loaded ({known.size} bytes before, {status.st_size} "
                "now): start the run again when the file is complete"
            )


def crc_followed_by(crc: int, count: int) -> int:
    """Return what a part's CRC-32 adds to that of the full data, if so many bytes follow the part.

    The CRC-32 of the full data is the XOR over its parts (as ``crc32_combine`` of zlib computes it).
    """
    power, square = 1 << 31, 1 << 23  # the polynomials 1 and x^8
    while count:
        if count & 1:
            power = _multiply(power, square)
        square, count = _multiply(square, square), count >> 1
    return _multiply(power, crc)


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (CRC_POLYNOMIAL if b & 1 else 0)
    return product


def xor_over_ranks(world: DistContext, values: Sequence[int]) -> list[int]:
    """Return the bitwise XOR over all ranks of each 32-bit value. Collective."""
    total = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(total, op=dist.ReduceOp.BXOR, group=world.control)
    return total.tolist()
