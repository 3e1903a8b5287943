"""Read safetensors headers, map stored tensors to the model's by transformers' rules, and read them one at a time or as
ranges.

Names and layouts in files may differ from the model's: experts may be separate in files and one tensor in the model,
and prefixes may differ. The rules run first on tensors without content, so that names, shapes and dtypes are checked
before any weight is read.

Ranks read their own parts of the files (`DirectReads`) if all ranks see the same files, of tensors that are stored as
the model has
them: rank 0 describes each file by its path, size, time of change, and a hash of its header and of samples of its
weights, and every
rank compares this with what it finds under the path. If one rank finds anything else, all ranks receive the weights
from rank 0. A rank reads ranges of bytes with `pread`, in pieces: a shard is one range. A mapped file would end the
process with SIGBUS if it were truncated meanwhile; `pread` returns fewer bytes, which becomes an error with the name of
the file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.train.data.tokenization import first_line
from allranks.train.distributed import DistContext
from allranks.utils.inputs import open_regular
from allranks.utils.safetensors_files import MAX_HEADER, StoredTensor

OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in OF_NAME.items()}


Give = Callable[[str], torch.Tensor]
MAPPED_BYTES = 64 << 20  # limit of pages that stay mapped after they are read
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

    def make(self, give: Give, model: Any) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name; `give` returns the tensor of a stored name."""
        if self.rule is None:
            return {self.first: give(self.parts[0][1])}
        rule = deepcopy(self.rule)
        for pattern, name in self.parts:
            rule.add_tensor(self.first, name, pattern, lambda name=name: give(name))
        made = rule.convert(self.first, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


@dataclass(frozen=True)
class WeightConversions:
    """Conversions for all tensors of the model.

    Attributes:
        by_name: conversion of each tensor that the files hold.
        dtypes: target dtype of each tensor of the model.
        rules_used: indices of transformers' rules for this model that match a name in the files.
    """

    by_name: dict[str, WeightConversion]
    dtypes: dict[str, torch.dtype]
    rules_used: list[int]


def conversions_for(model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, name: str) -> WeightConversions:
    """Match stored tensors with the model's tensors.

    Args:
        model: a transformers model; its tensors need no content.
        name: the model's name in the spec, for messages.

    Raises:
        SpecError: the shape of a stored tensor differs from the model's config, or its dtype cannot be trained.
    """
    wanted = model.state_dict()
    dtypes = dtypes_of(model, dtype)
    made: dict[str, WeightConversion] = {}
    rules = _rules(model)
    for recipe in _group(model, stored, wanted, rules):
        for target, tensor in _traced(recipe, model, stored, name).items():
            if target not in wanted:
                continue
            files = f"{stored[recipe.stored[0]].file}: {recipe.stored[0]}" + (
                f" and {len(recipe.parts) - 1} more" if len(recipe.parts) > 1 else ""
            )
            if tensor.shape != wanted[target].shape:
                raise SpecError(
                    f"model.name {name}: {files}: gives {target} the shape {tuple(tensor.shape)}, the model's config "
                    f"requires {tuple(wanted[target].shape)}: config.json does not match the weight files"
                )
            for part in recipe.stored:
                _check_dtype(stored[part], part, dtypes[target], name)
            made[target] = recipe
    return WeightConversions(made, dtypes, [i for i, rule in enumerate(rules) if rule.was_used()])


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


class WeightSource(Protocol):
    """Provide weights on the CPU. Only the rank that reads has a source."""

    read_bytes: int

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor. It may be requested again: PEFT keeps a fully trained module beside its frozen original."""
        ...

    def forget(self, name: str) -> None:
        """Release a tensor that will not be requested again."""
        ...


class FileSource:
    """Read tensors from safetensors files on demand: pages are mapped, used and released."""

    def __init__(self, stored: Mapping[str, StoredTensor], recipes: WeightConversions, model: Any) -> None:
        self.model = model
        self._stored, self._recipes = stored, recipes
        self._open: dict[Path, Any] = {}
        self._since = 0
        self._made: dict[str, torch.Tensor] = {}
        self.read_bytes = 0

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors that the files hold."""
        return sorted(self._recipes.by_name)

    @property
    def rules_used(self) -> list[int]:
        """See `WeightConversions`."""
        return self._recipes.rules_used

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return next(iter(self._stored.values())).file.parent

    def unconverted(self) -> dict[str, StoredTensor]:
        """Return, by name, the model's tensors that are stored as they are, perhaps in another dtype."""
        recipes = self._recipes.by_name.items()
        return {name: self._stored[recipe.stored[0]] for name, recipe in recipes if recipe.rule is None}

    def take(self, name: str) -> torch.Tensor:
        if name in self._made:
            return self._made.pop(name)
        recipe = self._recipes.by_name[name]
        made = recipe.make(lambda part: self._read(part, self._recipes.dtypes[name]), self.model)
        tensor = made.pop(name).to(self._recipes.dtypes[name])
        self._made |= {n: t for n, t in made.items() if n in self._recipes.by_name}
        if self._since > MAPPED_BYTES:
            self._open.clear()
            self._since = 0
        return tensor

    def forget(self, name: str) -> None:
        """Do nothing: no tensor is kept in memory."""

    def _read(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        self.read_bytes += self._stored[part].bytes
        self._since += self._stored[part].bytes
        tensor = self._tensor(part)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def _tensor(self, part: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._stored[part].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(part)
        except (OSError, SafetensorError) as error:
            raise EnvironmentNotAble(f"{file}: {part} cannot be read: {first_line(error)}") from None


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


@dataclass(frozen=True)
class FileFacts:
    """A file as rank 0 sees it. ``content``: SHA-256 of its header and of samples of its weights."""

    path: Path
    size: int
    changed_ns: int
    content: str


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model, and the tensors in them that are stored as the model has them.

    Attributes:
        places: by the model's names, the index of the file, the offset of the first byte, and the dtype's name in the
        format.
    """

    files: list[FileFacts]
    places: dict[str, tuple[int, int, str]]


@dataclass(frozen=True)
class Agreement:
    """Whether all ranks see the same files.

    Attributes:
        reason: why not; empty if they do.
        first_node: number of ranks on rank 0's node, which are the first ones.
    """

    reason: str
    first_node: int


def describe(source: FileSource) -> WeightFiles:
    """Describe the files of a model.

    Raises:
        EnvironmentNotAble: a file cannot be read.
    """
    stored = source.unconverted()
    paths = sorted({entry.file for entry in stored.values()})
    try:
        facts = [_facts(path.absolute()) for path in paths]
    except OSError as error:
        raise EnvironmentNotAble(f"{error.filename or source.folder}: cannot be read: {error.strerror}") from None
    index = {path: i for i, path in enumerate(paths)}
    return WeightFiles(facts, {name: (index[e.file], e.offset, e.dtype) for name, e in stored.items()})


def agree(world: DistContext, known: WeightFiles) -> Agreement:
    """Compare the files that this rank sees with those that rank 0 has described. Collective; all ranks get the same
    answer."""
    mine = next((reason for facts in known.files if (reason := difference(facts))), "")
    every: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(every, (mine, world.host), group=world.control)
    others = sum(bool(reason) for reason, _ in every) - 1
    more = f", and {others} more ranks differ from rank 0" if others > 0 else ""
    reason = next((f"rank {r} on {host} {reason}{more}" for r, (reason, host) in enumerate(every) if reason), "")
    first_node = next((r for r, (_, host) in enumerate(every) if host != every[0][1]), world.size)
    return Agreement(reason, first_node)


def difference(known: FileFacts) -> str:
    """Return in what a file differs from its description, as the end of a sentence; empty if in nothing."""
    path = known.path
    try:
        with open_regular(path) as stream:
            status = os.fstat(stream.fileno())
            if status.st_size != known.size:
                return f"finds {status.st_size} bytes in {path}, rank 0 {known.size}"
            if status.st_mtime_ns != known.changed_ns:
                return f"finds another time of change of {path} than rank 0"
            same = _content(stream, known.size) == known.content
    except FileNotFoundError:
        return f"does not see {path}"
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return "" if same else f"finds other content in {path} than rank 0"


def _facts(path: Path) -> FileFacts:
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        return FileFacts(path, status.st_size, status.st_mtime_ns, _content(stream, status.st_size))


def _content(stream: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the header and of samples of the weights."""
    start = stream.read(8)
    length = min(int.from_bytes(start, "little"), MAX_HEADER)
    digest = hashlib.sha256(start + stream.read(length))
    for i in range(SAMPLES):  # from the first bytes to the last ones
        stream.seek(8 + length + max(size - 8 - length - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
        digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


class DirectReads:
    """Read ranges of the stored tensors of a model."""

    def __init__(self, known: WeightFiles, dtypes: Mapping[str, torch.dtype]) -> None:
        """Initialize. `dtypes` has the dtype by name to which `read` converts."""
        self._known, self._dtypes = known, dtypes
        self._open: dict[int, int] = {}  # descriptors by the file's index
        self._buffer: torch.Tensor | None = None
        self.read_bytes = 0

    def why_not(self, name: str) -> str:
        """Return why a tensor cannot be read as ranges; empty if it can."""
        return "" if name in self._known.places else "the files hold them in another layout"

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor as `read` returns it."""
        return self._dtypes[name]

    def ranges(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide the elements from `start` to `stop` of a flattened tensor into ranges for `read`."""
        step = PIECE_BYTES // OF_NAME[self._known.places[name][2]].itemsize
        return [(low, min(low + step, stop)) for low in range(start, stop, step)]

    def read(self, name: str, low: int, high: int) -> torch.Tensor:
        """Return the elements of one range of `ranges`. They are valid until the next range is read.

        Raises:
            EnvironmentNotAble: the file cannot be read, ends too early, or was changed since the ranks compared it.
        """
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        index, offset, stored = self._known.places[name]
        dtype = OF_NAME[stored]
        raw = self._buffer[: (high - low) * dtype.itemsize]
        path, view, done = self._known.files[index].path, raw.numpy().data, 0
        try:
            if index not in self._open:
                with open_regular(path) as stream:
                    self._open[index] = os.dup(stream.fileno())
                self._require_unchanged(index)
            while done < len(view):
                at = offset + low * dtype.itemsize + done
                count = os.preadv(self._open[index], [view[done:]], at)
                if count == 0:
                    raise EnvironmentNotAble(
                        f"{path}: {name} cannot be read: the file was truncated to {at} bytes or fewer while it was "
                        "read. Download it again"
                    )
                done += count
        except OSError as error:
            raise EnvironmentNotAble(f"{path}: {name} cannot be read: {error.strerror}") from None
        self.read_bytes += len(view)
        return raw.view(dtype).to(self._dtypes[name])

    def close(self) -> None:
        """Close the open files.

        Raises:
            EnvironmentNotAble: one was changed while it was read.
        """
        try:
            for index in self._open:
                self._require_unchanged(index)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _require_unchanged(self, index: int) -> None:
        known, status = self._known.files[index], os.fstat(self._open[index])
        if (status.st_size, status.st_mtime_ns) != (known.size, known.changed_ns):
            raise EnvironmentNotAble(
                f"{known.path}: was changed while the model was loaded ({known.size} bytes before, {status.st_size} "
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
