"""What is wrong whatever the machine: refused before anything is asked of a node."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.errors import DataError, SpecError
from allranks.spec.records import DataSpec, RunSpec, ScriptSpec


def check_request(spec: RunSpec) -> None:
    """Refuse what is wrong whatever the machine: an unknown model, a missing or empty data file, a missing column.

    Raises:
        SpecError, DataError: with the key and the cure.
    """
    from allranks.mlp import is_mlp
    from allranks.train.tiny import check_folder, family

    if spec.script is not None and spec.cluster.launcher == "local":
        _check_script(spec.script)
    if spec.model is not None and is_mlp(spec.model.name):
        return  # on noise, as the spec's own rules have it
    if spec.model is not None:
        if spec.model.name.startswith("tiny:"):
            family(spec.model.name)
        else:
            check_folder(spec.model.name)
    if spec.data is not None:
        _check_data(spec, spec.data)
    if spec.data is not None and spec.eval.source is not None:
        try:
            _check_data(spec, msgspec.structs.replace(spec.data, source=spec.eval.source))
        except DataError as error:
            raise DataError(str(error).replace("data.source", "eval.source")) from None


def _check_script(script: ScriptSpec) -> None:
    path = Path(script.path).expanduser()
    if not path.is_file():
        raise SpecError(
            f"script.path {path}: {'this is a folder' if path.is_dir() else 'there is no such file'}; looked from {Path.cwd()}"
        )


def _check_data(spec: RunSpec, data: DataSpec) -> None:
    from allranks.train.data import sources
    from allranks.train.data.templates import choose_template, require_template
    from allranks.train.tiny import ENCODERS

    require_template(data.template)
    if data.source.startswith("builtin:"):
        own = sources.builtin(data.source)
        if data.template != "auto" or data.columns:  # else it brings its own
            choose_template(data, own.rows(1, data.seed), classifier=family_of(spec) in ENCODERS)
        return
    if not sources.looks_like_file(data.source):
        return
    path = Path(data.source).expanduser()
    row = sources.peek(path)
    if row is None:
        if path.stat().st_size == 0:
            raise DataError(f"data.source {path}: the file is empty")
        return
    tiny = family_of(spec)
    if tiny or data.template != "auto":
        choose_template(data, [row], classifier=tiny in ENCODERS)


def family_of(spec: RunSpec) -> str | None:
    """``mistral`` of ``tiny:mistral``; None where only the model's files tell."""
    from allranks.train.tiny import family

    return family(spec.model.name) if spec.model is not None and spec.model.name.startswith("tiny:") else None
