"""Describe the data for ``allranks init``, and ask for the columns where no template fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from allranks.cli.options import write_new_file
from allranks.errors import DataError, RequestError
from allranks.utils.redaction import redact

if TYPE_CHECKING:
    from allranks.spec.data_sources import Row

MAX_COLUMNS_SHOWN = 20
MAX_VALUE_CHARACTERS = 60


class Answers(Protocol):
    """What `data_columns` needs of the answers of ``init``."""

    values: dict[str, Any]
    ask: bool
    reasked: set[str]

    def tell(self, text: str) -> None:
        """Print a line, once."""

    def take(self, key: str, question: str, default: Any) -> Any:
        """Return the option, else the answer, else the default."""


def describe_data(source: str) -> str:
    """Return what a source is: a built-in set, a file with its columns, or a name of the hub.

    Raises:
        DataError: it is a file that cannot be used.
    """
    from allranks.spec import data_sources
    from allranks.spec.data_columns import merged_row
    from allranks.spec.data_suggestions import listed
    from allranks.spec.models import NOISE_SOURCE
    from allranks.utils.formatting import format_bytes

    if source == NOISE_SOURCE:
        return "random numbers for mlp: models"
    if source.startswith("builtin:"):
        own = data_sources.builtin_set(source)
        return f"built-in set, {own.default_rows:,} rows, template {own.template}"
    if not data_sources.looks_like_file(source):
        return "no file of this name here, so a data set of the Hugging Face hub; it is loaded when the run starts"
    path = Path(source).expanduser()
    row = merged_row(data_sources.read_first_rows(path))
    columns = f", columns {listed(list(row))}" if row else ""
    return f"{path.suffix.lower().removeprefix('.')} file of {format_bytes(path.stat().st_size)}{columns}"


def data_columns(answers: Answers, model: str, source: str) -> tuple[tuple[str, str], ...]:
    """Return the roles of columns: those of the option, or of the answer where no template fits the file.

    The answer can also be the name of a Jinja file, which becomes the option ``template``. If there is no such file, its beginning is written.

    Raises:
        RequestError: the option or the answer is neither of both.
    """
    from allranks.spec import data_sources

    given = answers.values.get("columns")
    if given is not None and "columns" not in answers.reasked:
        return _accept(answers, str(given), {})
    if not answers.ask or answers.values.get("template") or not data_sources.looks_like_file(source):
        return ()
    rows = data_sources.read_first_rows(Path(source).expanduser())
    if not rows or not _none_fits(source, rows, model):
        return ()
    return _ask(answers, source, rows, model)


def _none_fits(source: str, rows: list[Row], model: str) -> bool:
    from allranks.spec.data_columns import NoTemplateFits, fitting_template
    from allranks.spec.records import DataSpec

    try:
        fitting_template(DataSpec(source=source), {}, rows, classifier=_classifies(model))
    except NoTemplateFits as error:
        return "separated by" not in str(error)
    except DataError:
        return False  # `plan` says it
    return False


def _classifies(model: str) -> bool:
    """Return whether a model is trained as a classifier; False if that is not known here."""
    from allranks.nodes.preflight.request import is_classifier
    from allranks.spec.loader import parse_spec

    return is_classifier(parse_spec({"model": {"name": model}, "data": {"source": "builtin:instructions"}})) is True


def _ask(answers: Answers, source: str, rows: list[Row], model: str) -> tuple[tuple[str, str], ...]:
    from allranks.spec.data_columns import fitting_template, merged_row
    from allranks.spec.data_suggestions import suggested_columns
    from allranks.spec.records import DataSpec

    row = merged_row(rows)
    answers.tell("No template fits these columns; the first row:")
    for name, value in list(row.items())[:MAX_COLUMNS_SHOWN]:
        answers.tell(f"  {name}: {_shortened(value)}")
    pairs = suggested_columns(row, {}, classifier=_classifies(model))
    default = ", ".join(f"{role}={name}" for role, name in pairs.items()) or f"{Path(source).stem}.jinja"
    question = "Which column is what (ROLE=COLUMN, ...; or a .jinja file)"
    answer = answers.take("columns", question, default)
    columns = _accept(answers, str(answer or default), row)
    if columns:  # a mistake is reported at its question
        fitting_template(DataSpec(source=source), dict(columns), rows, classifier=_classifies(model))
    return columns


def _shortened(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).split())
    text = redact(text)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def _accept(answers: Answers, text: str, row: Row) -> tuple[tuple[str, str], ...]:
    """Return the roles of an answer, or take it as the name of a Jinja file."""
    if Path(text).suffix in (".jinja", ".jinja2", ".j2") and "=" not in text:
        path = Path(text).expanduser()
        if row and not path.exists():
            from allranks.spec.data_suggestions import suggested_jinja

            write_new_file(path, suggested_jinja(row), force=False)
            answers.tell(f"wrote {path}, a first template; edit it, and see the rows with `allranks data`")
        answers.values.update(columns=None, template=text)
        return ()
    return parse_columns(text)


def parse_columns(text: str) -> tuple[tuple[str, str], ...]:
    """Return roles and columns of ``prompt=question, response=answer``; the YAML form ``{prompt: question}`` is taken, too.

    Raises:
        RequestError: it has another form, or names a role twice.
    """
    inner = re.sub(r"^\s*(columns:)?\s*\{|\}\s*$", "", text)
    pairs = []
    for part in inner.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*[=:]\s*(\S(?:.*\S)?)\s*", part)
        if found is None:
            raise RequestError(
                f"--columns {text}: expected ROLE=COLUMN, ..., such as prompt=question,response=answer; columns whose names have a comma "
                "are written in the spec"
            )
        pairs.append((found[1], found[2].strip("\"'") if found[2][0] in "\"'" else found[2]))
    roles = [role for role, _ in pairs]
    if twice := next((role for role in roles if roles.count(role) > 1), None):
        raise RequestError(f"--columns {text}: {twice} occurs twice; several columns of a role are written in the spec")
    return tuple(pairs)
