"""What is wrong whatever the machine: refused before anything is asked of a node."""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.errors import DataError
from allranks.spec.records import DataSpec, RunSpec


def check_request(spec: RunSpec) -> None:
    """Refuse what is wrong whatever the machine: an unknown model, a missing or empty data file, a missing column.

    Raises:
        SpecError, DataError: with the key and the cure.
    """
    from allranks.mlp import is_mlp
    from allranks.train.tiny import check_folder, family

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
        _check_data(spec, msgspec.structs.replace(spec.data, source=spec.eval.source))


def _check_data(spec: RunSpec, data: DataSpec) -> None:
    from allranks.train.data import sources
    from allranks.train.data.templates import choose_template
    from allranks.train.tiny import ENCODERS, family

    if data.source.startswith("builtin:"):
        sources.builtin(data.source)
        return
    if not sources.looks_like_file(data.source):
        return
    path = Path(data.source).expanduser()
    row = sources.peek(path)
    if row is None:
        if path.stat().st_size == 0:
            raise DataError(f"data.source {path}: the file is empty")
        return
    tiny = spec.model is not None and spec.model.name.startswith("tiny:")
    if tiny or data.template != "auto":
        assert spec.model is not None
        choose_template(data, [row], classifier=tiny and family(spec.model.name) in ENCODERS)
