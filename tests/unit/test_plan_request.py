"""What `plan` and `run` refuse whatever the machine: names of templates, columns, sets and scripts that are not
there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.errors import AllranksError
from allranks.nodes.preflight import check_request
from allranks.spec import parse_spec

RAW: dict[str, Any] = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
NEWS = {"source": "builtin:news", "template": "classification"}
BERT = {"name": "tiny:bert"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"source": "some/set", "template": "alpca"}}, "data.template: unknown template 'alpca'; did you mean 'alpaca'"),
        ({"data": {"source": "some/set", "template": "nowhere.j2"}}, "data.template nowhere.j2: there is no such file"),
        ({"data": {"source": "builtin:instructions", "template": "nowhere.jinja"}}, "nowhere.jinja: there is no such file"),
        ({"model": BERT, "data": {**NEWS, "columns": {"label": "lable"}}}, "there is no column 'lable' (data.columns.label); did you mean 'label'"),
        ({"data": {"source": "builtin:instructons"}}, "did you mean builtin:instructions"),
        ({"eval": {"source": "nowhere.json"}}, "eval.source nowhere.json: there is no such file"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_before_anything_starts(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AllranksError) as refused:
        check_request(parse_spec({**RAW, **change}))
    assert words in str(refused.value) and refused.value.exit_code == 2


def test_a_script_that_is_not_there_is_refused_on_this_machine_alone(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "own.py", "there is no such file"), (tmp_path, "this is a folder")):
        with pytest.raises(AllranksError, match=words):
            check_request(parse_spec({"script": {"path": str(path)}}))
    # the nodes may see what the login side does not; they are asked
    check_request(parse_spec({"script": {"path": "/nowhere/own.py"}, "cluster": {"launcher": "slurm"}}))
    (tmp_path / "own.py").touch()
    check_request(parse_spec({"script": {"path": str(tmp_path / "own.py")}}))


def test_what_is_there_passes() -> None:
    check_request(parse_spec({**RAW, "model": BERT, "data": NEWS}))
    check_request(parse_spec({**RAW, "data": {"source": "some/set", "template": "chat"}}))
