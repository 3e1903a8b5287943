"""Mixtures: what an epoch is, that it is the same every time, and what is refused."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import AllranksError
from allranks.nodes.preflight.request import check_request, check_rows
from allranks.nodes.staging.manifests import NodeStage, for_node
from allranks.nodes.staging.sources import requested_parts
from allranks.spec import parse_spec, spec_to_yaml
from allranks.spec.data_rows import read_examples
from allranks.spec.data_sources import apportion, parts_of
from allranks.train.data.prepared import PreparedData, prepare
from tests.conftest import tiny_spec

Spec = dict[str, Any]


def mixed(folder: Path, sources: list[dict[str, Any]], **data: Any) -> Spec:
    """Write a.jsonl (60 rows of alpaca) and b.jsonl (10 pairs), and return a spec that mixes what is named."""
    a = [{"instruction": f"a {i}", "output": f"out {i}"} for i in range(60)]
    for name, rows in (("a", a), ("b", [{"prompt": f"b {i}", "response": f"reply {i}"} for i in range(10)])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    spec = tiny_spec("", folder)
    named = [one if ":" in one["source"] else {**one, "source": f"{folder}/{one['source']}"} for one in sources]
    spec["data"] = {"sources": named, "max_length": 64, "eval_fraction": 0.1, **data}
    return spec


def prepared(spec: Spec) -> PreparedData:
    return prepare(parse_spec(spec), Path(spec["cluster"]["cache"]), classifier=False, log=print)


BOTH = [{"source": "a.jsonl", "weight": 1}, {"source": "b.jsonl", "weight": 1}]


def test_shares_of_an_epoch_follow_the_weights(tmp_path: Path) -> None:
    found = read_examples(parse_spec(mixed(tmp_path, BOTH)), classifier=False)
    assert [(one.rows, one.rows_held_out, one.rows_train) for one in found.sources] == [(60, 6, 32), (10, 1, 31)]
    assert len(found.train) == 63, "as many rows as all sources have for training"
    counts = Counter((Path(example.source).name, example.row) for example in found.train)
    of_b = [n for (name, _), n in counts.items() if name == "b.jsonl"]
    assert len(of_b) == 9 and set(of_b) == {3, 4}, "rows of a short source are repeated equally often"
    assert {n for (name, _), n in counts.items() if name == "a.jsonl"} == {1}, "rows of a long one occur once, or not"
    trained = {str((example.messages, example.turns)) for example in found.train}
    assert not any(str((example.messages, example.turns)) in trained for example in found.held_out)
    assert len(found.held_out) == 7
    three = mixed(tmp_path, [{**BOTH[0], "weight": 3}, BOTH[1]], subset=40)
    assert [one.rows_train for one in read_examples(parse_spec(three), classifier=False).sources] == [30, 10]


def test_an_epoch_is_the_same_every_time_and_depends_on_seed_weights_and_content(tmp_path: Path) -> None:
    spec = mixed(tmp_path, BOTH, subset=40)
    digest = prepared(spec).facts.train_hash
    assert prepared({**spec, "cluster": {"cache": str(tmp_path / "other")}}).facts.train_hash == digest
    for change in ({"seed": 7}, {"sources": [{**spec["data"]["sources"][0], "weight": 2}, spec["data"]["sources"][1]]}):
        assert prepared({**spec, "data": {**spec["data"], **change}}).facts.train_hash != digest
    last = tmp_path / "b.jsonl"
    last.write_text(last.read_text().replace("reply", "other"))
    assert prepared(spec).facts.train_hash != digest, "the second file counts, too"


def test_facts_name_the_sources_and_repeated_rows_are_not_duplicates(tmp_path: Path) -> None:
    facts = prepared(mixed(tmp_path, BOTH)).facts
    assert [Path(one.source).name for one in facts.sources] == ["a.jsonl", "b.jsonl"]
    assert (facts.rows, facts.rows_train, facts.rows_identical, facts.rows_duplicated) == (70, 63, 0, 0)
    assert facts.template == "alpaca + chat"
    often = prepared(mixed(tmp_path, [BOTH[0], {**BOTH[1], "weight": 9}])).facts
    assert any(re.search(r"each row of .*b\.jsonl occurs about 6 times", text) for text in often.warnings)


def test_a_source_has_its_own_template_and_columns(tmp_path: Path) -> None:
    spec = mixed(tmp_path, [BOTH[0], {**BOTH[1], "template": "text", "columns": {"text": ["prompt", "response"]}}])
    found = read_examples(parse_spec(spec), classifier=False)
    assert {e.turns[0] for e in found.train if e.source.endswith("b.jsonl")} >= {("b 1\nreply 1", True)}
    assert parse_spec(json.loads(json.dumps(spec))) == parse_spec(spec)
    assert "sources:" in spec_to_yaml(parse_spec(spec))


@pytest.mark.parametrize(
    ("sources", "data", "words"),
    [
        (BOTH, {"source": "x.jsonl"}, r"data\.source and data\.sources are both set; set only one"),
        ([], {}, r"data\.sources is empty"),
        ([{**BOTH[0], "weight": 0}], {}, r"data\.sources\[0\]\.weight: expected float > 0"),
        ([{**BOTH[0], "weight": -1}], {}, r"data\.sources\[0\]\.weight: expected float > 0"),
        ([{**BOTH[0], "wieght": 1}], {}, r"'data\.sources\[0\]\.wieght'; did you mean 'data\.sources\[0\]\.weight'"),
        ([BOTH[0], BOTH[0]], {}, r"a\.jsonl more than once; name it once, with a larger weight"),
        ([BOTH[0], {"source": "c.jsonl"}], {}, r"data\.sources\[1\]\.source .*c\.jsonl: there is no such file"),
        ([BOTH[0], {"source": "builtin:noise"}], {}, r"builtin:noise is for mlp: models and cannot be mixed"),
        ([BOTH[0], {"source": "builtin:news", "template": "classification"}], {}, r"classification gives labels"),
        ([BOTH[0], {**BOTH[1], "weight": 1e-4}], {}, r"sources\[1\]\.weight 0\.0001: .* none of the 63 rows"),
        ([BOTH[0], {**BOTH[1], "columns": {"prompt": "q", "response": "a"}}], {}, r"sources\[1\].* no column 'q'"),
    ],
)  # fmt: skip
def test_it_is_refused_before_the_launch(tmp_path: Path, sources: list[Spec], data: Spec, words: str) -> None:
    with pytest.raises(AllranksError, match=words):
        spec = parse_spec(mixed(tmp_path, sources, **data))
        check_rows(spec, check_request(spec))


def test_rows_are_left_to_the_ranks_where_the_launcher_has_no_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_spec(mixed(tmp_path, BOTH))
    monkeypatch.setitem(sys.modules, "numpy", None)
    check_rows(spec, check_request(spec))


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_sum_to_the_total_and_are_within_one_of_exact(total: int, weights: list[float]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert all(abs(n - total * w / sum(weights)) < 1 + 1e-6 for n, w in zip(shares, weights, strict=True))


def test_each_file_is_staged_and_its_copy_is_used(tmp_path: Path) -> None:
    spec = parse_spec(mixed(tmp_path, BOTH))
    parts = {part.name: part.find()[0] for part in requested_parts(spec)}
    assert [name for name in parts if name.startswith("data")] == ["data-1", "data-2"]
    staged_as = {key: f"/s/{n}/{path}" for n, part in parts.items() for key, path in (part.override or {}).items()}
    stage = NodeStage(node="n", folder="/s", python="", python_path=[], parts=[], variables=[], overrides=staged_as)
    staged = for_node(spec, stage)
    assert staged.data is not None
    assert [part.source for part in parts_of(staged.data)] == ["/s/data-1/a.jsonl", "/s/data-2/b.jsonl"]
