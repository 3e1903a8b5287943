"""Load rows from the hub, local files and built-in sets, and mixtures of them (``data.sources``)."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import DataError, EnvironmentNotAble
from allranks.spec.records import DataSpec
from allranks.utils.inputs import DuplicateKey, distinct_keys, open_regular, read_text
from allranks.utils.text import did_you_mean, nearest_file_hint

Row = dict[str, Any]
MAX_PEEK_BYTES = 20_000_000
FIRST_ROWS = 20
"""Rows that are read to know the columns."""
MAX_JSON_BYTES = 64 << 30
"""Limit for .json, .txt and .md files, which are read at once; .jsonl and .parquet have no limit."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
TEXT_KINDS = (".txt", ".md")
FILE_KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", *TEXT_KINDS)
_HELD_OUT_WORDS = {"test", "valid", "validation", "val", "dev", "eval", "evaluation", "heldout"}
"""Words in the names of files that are not for training."""


def load_rows(data: DataSpec) -> list[Row]:
    """Return all rows of the source, in its order.

    Raises:
        DataError: missing or unreadable file, no rows, unknown built-in set.
        EnvironmentNotAble: the hub cannot be reached.
    """
    source = source_of(data)
    if source.startswith("builtin:"):
        rows = builtin_set(source).rows(data.subset or builtin_set(source).default_rows, data.seed)
    elif looks_like_file(source):
        whole = data.text_rows == "file"
        if data.text_rows == "auto":
            whole = is_pattern(source) or Path(source).expanduser().is_dir()
        rows = [row for path in data_files(source) for row in read_file(path, whole_texts=whole)]
    else:
        rows = _load_hub(data)
    if not rows:
        raise DataError(f"data.source {data.source}: the set is empty")
    return rows


def looks_like_file(source: str) -> bool:
    """Return whether this is local, not a hub name: exists, is a pattern, has a known suffix or starts like a path."""
    path = Path(source).expanduser()
    known = path.suffix.lower() in FILE_KINDS or is_pattern(source)
    return known or path.exists() or source.startswith(("/", "./", "../", "~")) or source.endswith("/")


def is_pattern(source: str) -> bool:
    """Return whether this names files by a pattern such as ``texts/*.md``."""
    return glob.has_magic(source) and not Path(source).expanduser().exists()


def data_files(source: str) -> list[Path]:
    """Return the files of a local source in the order in which they are read: a file, those below a folder, or those of
    a pattern.

    Raises:
        DataError: there are none, one cannot be used, or those of a folder do not belong together.
    """
    path = Path(source).expanduser()
    if is_pattern(source):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path's own takes no absolute pattern
        files = [file for file in map(Path, matches) if file.is_file()]
        if not files:
            raise DataError(f"data.source {source}: no file matches this pattern; looked from {Path.cwd()}")
    else:
        files = _files_below(path) if path.is_dir() else [path]
    for file in files:
        check_data_file(file)
    return files


def _files_below(folder: Path) -> list[Path]:
    names = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    files = [name for name in names if name.suffix.lower() in FILE_KINDS]
    kinds = sorted({name.suffix.lower() for name in files})
    held_out = [name for name in files if not _HELD_OUT_WORDS.isdisjoint(re.split(r"[\W_]+", str(name).lower()))]
    if not files:
        raise DataError(f"data.source {folder}: no file below this folder has a known kind ({', '.join(FILE_KINDS)})")
    if len(kinds) > 1:
        raise DataError(
            f"data.source {folder}: the folder has files of several kinds ({', '.join(kinds)}); name the files by a "
            f"pattern, such as {folder}/**/*{kinds[0]}"
        )
    if held_out and len(held_out) < len(files):
        raise DataError(
            f"data.source {folder}: {held_out[0]} looks like evaluation data, which would be trained; name the "
            "training files alone, and the others as eval.source"
        )
    return [folder / name for name in files]


def builtin_set(source: str) -> Any:
    """Return the built-in set of ``builtin:<name>``."""
    from allranks.spec.builtin_data import BUILTIN

    name = source.removeprefix("builtin:")
    if name not in BUILTIN:
        hint = did_you_mean(name, BUILTIN, form="builtin:{}")
        raise DataError(f"data.source {source}: there is no such built-in set{hint} (known: {', '.join(BUILTIN)})")
    return BUILTIN[name]


def source_fingerprint(data: DataSpec) -> str:
    """Return a hash of what the rows depend on: file content, hub name with revision, or generator and seed."""
    import hashlib  # loads OpenSSL, which no plan needs

    digest, source = hashlib.sha256(), source_of(data)
    if source.startswith("builtin:"):
        from allranks.version import __version__

        digest.update(f"{source} {builtin_set(source).default_rows} {data.subset} {data.seed} {__version__}".encode())
    elif looks_like_file(source):
        for path in data_files(source):
            with open_regular(path) as file:
                digest.update(f"{path.suffix} {path.stat().st_size} ".encode())
                while block := file.read(1 << 20):
                    digest.update(block)
    else:
        digest.update(f"hub {data.source} {data.config} {data.split} {data.revision}".encode())
    return digest.hexdigest()


def check_data_file(path: Path) -> None:
    """Refuse a path that is not a readable file of a known kind."""
    if not path.exists():
        hint = nearest_file_hint(path) or f"; looked from {Path.cwd()}"
        raise DataError(f"data.source {path}: there is no such file{hint}")
    if not path.is_file():
        raise DataError(f"data.source {path}: expected a regular file, found a pipe, a socket or a device")
    if path.suffix.lower() not in FILE_KINDS:
        raise DataError(f"data.source {path}: unknown kind of file {path.suffix!r} (known: {', '.join(FILE_KINDS)})")
    with suppress(OSError), open_regular(path) as file:  # a file that cannot be read is refused by its reader
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise DataError(f"data.source {path}: this is a Git LFS pointer, not the data; run git lfs pull")


def read_first_rows(source: str | Path) -> list[Row]:
    """Return the first rows of a local source if reading them is cheap, for checks before the run starts; none if it is
    not.

    A table without rows gives one row with empty values, so that its columns are known.

    Raises:
        DataError: a file cannot be read, or its beginning is not what its suffix says.
    """
    path = data_files(str(source))[0]
    if path.suffix.lower() in (".json", *TEXT_KINDS) and path.stat().st_size > MAX_PEEK_BYTES:
        return []
    with _named(path):
        columns, rows = _open_rows(path)
        return list(itertools.islice(rows, FIRST_ROWS)) or ([dict.fromkeys(columns, "")] if columns else [])


def read_file(path: Path, *, whole_texts: bool = False) -> list[Row]:
    """Return the rows of one local file. A text file is one row per paragraph, or one with `whole_texts`."""
    with _named(path):
        return list(_open_rows(path, whole_texts=whole_texts)[1])


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors of reading it."""
    try:
        yield
    except RecursionError:
        raise DataError(f"data.source {path}: a value is nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.source {path}: not UTF-8 text at byte {error.start}; convert the file to UTF-8 (spreadsheets: save "
            "as CSV UTF-8)"
        ) from None
    except OSError as error:
        raise DataError(f"data.source {path}: cannot be read: {error.strerror or error}") from None


def _open_rows(path: Path, *, whole_texts: bool = False) -> tuple[list[str], Iterator[Row]]:
    """Return the columns of a table, none for other kinds of files, and the rows, which are read as they are needed."""
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv", ".parquet"):
        table = _parquet_table(path) if kind == ".parquet" else _csv_table(path)
        return _require_distinct(next(table), path), table
    if kind not in TEXT_KINDS:
        return [], _json_rows(path) if kind == ".json" else _jsonl_rows(path)
    text = _read_text(path).replace("\r\n", "\n")
    parts = [text] if whole_texts else re.split(r"\n(?:[ \t]*\n)+", text)
    return [], iter([{"text": part.strip("\n")} for part in parts if part.strip()])


def _read_text(path: Path) -> str:
    return read_text(path, MAX_JSON_BYTES, encoding="utf-8-sig")


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(_read_text(path), object_pairs_hook=distinct_keys)
    except DuplicateKey as error:
        raise DataError(f"data.source {path}: {error}") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _jsonl_rows(path)
            return
        raise DataError(f"data.source {path}, line {error.lineno}: not JSON: {error.msg}") from None
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"data.source {path}: expected a list of rows, each an object with named columns")
    yield from value


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=distinct_keys)
            except json.JSONDecodeError as error:
                raise DataError(f"data.source {path}, line {line_number}: not JSON: {error.msg}") from None
            except DuplicateKey as error:
                raise DataError(f"data.source {path}, line {line_number}: {error}") from None
            if not isinstance(row, dict):
                raise DataError(
                    f"data.source {path}, line {line_number}: expected an object with named columns, found a "
                    f"{type(row).__name__}"
                )
            yield row


def _require_distinct(names: list[str], path: Path) -> list[str]:
    """Return the columns of a table; refuse two of one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(
            f"data.source {path}: the column {twice!r} occurs {names.count(twice)} times; rename or remove the others"
        )
    return names


def _csv_table(path: Path) -> Iterator[Any]:
    """Yield the names of the columns, then the rows."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
        header = next((line for line in file if line.strip()), "")
        file.seek(0)
        reader = csv.DictReader(file, delimiter=_delimiter(path, header), strict=True)
        try:
            yield list(reader.fieldnames or [])
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"data.source {path}, line {reader.line_num}: the number of fields differs from the header's "
                        f"{len(reader.fieldnames or [])}"
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"data.source {path}, line {reader.line_num}: not CSV: {error}") from None


def _delimiter(path: Path, header: str) -> str:
    """Return the separator of a table: a tab for .tsv; for .csv a comma, or, if the header has none, a semicolon or a
    tab.

    Spreadsheets write semicolons in languages with a decimal comma.
    """
    if path.suffix.lower() == ".tsv":
        return "\t"
    outside_quotes = re.sub(r'"[^"]*"', "", header)
    return next((mark for mark in ",;\t" if mark in outside_quotes), ",")


def _parquet_table(path: Path) -> Iterator[Any]:
    """Yield the names of the columns, then the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as stream:
            file = pq.ParquetFile(stream)
            yield list(file.schema_arrow.names)
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"data.source {path}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _load_hub(data: DataSpec) -> list[Row]:
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(source_of(data), data.config, split=data.split, revision=data.revision)
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of many libraries
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if _hub_answers(error):
            raise DataError(
                f"data.source {data.source}: the hub has no such data set (or it is gated: set HF_TOKEN): {text}"
            ) from None
        raise EnvironmentNotAble(
            f"data.source {data.source}: not a local file, and it could not be loaded from the hub: {text}; "
            "on a machine without network use a local file, or fill the cache beforehand (HF_HOME)"
        ) from None
    return [dict(row) for row in loaded]


def _hub_answers(error: BaseException | None) -> bool:
    """Return whether the hub itself refused, as opposed to being unreachable."""
    while error is not None:
        if type(error).__name__ in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def parts_of(data: DataSpec) -> list[DataSpec]:
    """Return a `DataSpec` with one source for each source; the data itself if it has only ``data.source``.

    The parts of a mixture have no ``subset``: it is the number of rows that all of them give to an epoch.
    """
    if data.sources is None:
        return [data]
    parts = []
    for one in data.sources:
        own = {
            name: value
            for name in ("template", "columns", "split", "config", "revision")
            if (value := getattr(one, name)) is not None
        }
        parts.append(msgspec.structs.replace(data, source=one.source, sources=None, subset=None, **own))
    return parts


def source_of(data: DataSpec) -> str:
    """Return ``data.source`` of a part, or the names of all sources."""
    if data.sources is not None:
        return " + ".join(one.source for one in data.sources)
    return data.source or ""


def key_of(data: DataSpec, number: int) -> str:
    """Return the key of the spec that names this source."""
    return "data.source" if data.sources is None else f"data.sources[{number}].source"


def mixture_problems(data: DataSpec) -> list[str]:
    """Return a sentence for each contradiction between ``data.source`` and ``data.sources``."""
    if data.sources is None:
        missing = (
            "data.source is missing; set a hub name, a file, or for example builtin:instructions (or data.sources)"
        )
        return [] if data.source is not None else [missing]
    if data.source is not None:
        return ["data.source and data.sources are both set; set only one"]
    names = [one.source for one in data.sources]
    problems = [] if names else ["data.sources is empty; list at least one {source, weight}"]
    rows = [(one.source, one.split, one.config) for one in data.sources]
    twice = dict.fromkeys(row[0] for row in rows if rows.count(row) > 1)
    problems += [f"data.sources names {name} more than once; name it once, with a larger weight" for name in twice]
    if "builtin:noise" in names:
        problems.append("data.sources: builtin:noise is for mlp: models and cannot be mixed; use data.source")
    return problems


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers that sum to `total`, proportional to the weights (largest remainder; the first of equal ones)."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return shares
