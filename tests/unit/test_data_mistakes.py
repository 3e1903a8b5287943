"""Mistakes in data files and data sections that would train on something else than the user means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import AllranksError, DataError, SpecError
from allranks.nodes.preflight import check_request
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.train.data.prepared import DataFacts, prepare
from allranks.utils.machine import Gpu, MachineFacts
from tests.conftest import tiny_spec

GOOD = [{"instruction": f"say {i}", "output": f"word {i}"} for i in range(40)]
MACHINE = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def facts_of(folder: Path, name: str, content: str | bytes, data: dict[str, Any], **sections: Any) -> DataFacts:
    """What becomes of a file: the checks before the launch, the plan, and the preparation that the ranks do."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    spec = parse_spec(tiny_spec(path, folder, **{**sections, "data": data}))
    check_request(spec)
    make_plan(spec, MACHINE)
    return prepare(spec, folder / "cache", classifier=False, log=print).facts


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "yes"}]} for i in range(20)
]
REFUSED: dict[str, tuple[str, str | bytes, dict[str, Any], type[AllranksError], str]] = {
    "CSV column twice": ("a.csv", "instruction,output,output\na,b,c\n", {}, DataError, r"column 'output' occurs 2 times"),
    "TSV column twice": ("a.tsv", "text\ttext\na\tb\n", {}, DataError, r"column 'text' occurs 2 times"),
    "JSON key twice": ("a.json", '[{"instruction": "a", "output": "b", "output": "c"}]', {}, DataError, r"key 'output' occurs twice"),
    "JSONL key twice": (
        "a.jsonl", lines(GOOD) + '{"instruction": "a", "output": "b", "output": "c"}', {}, DataError, r"line 41: the key 'output' occurs twice",
    ),
    "empty file": ("a.jsonl", "", {}, DataError, r"the file is empty"),
    "every response missing": ("a.jsonl", lines([{**r, "output": None} for r in GOOD]), {}, DataError, r"'output' is empty or missing in every row"),
    "misspelt role": ("a.jsonl", lines(GOOD), {"columns": {"instructoin": "instruction"}}, SpecError, r"'instructoin' is not used.*did you mean 'instruction'"),
    "role of another template": ("a.jsonl", lines(GOOD), {"columns": {"messages": "output"}, "template": "alpaca"}, SpecError, r"'messages' is not used"),
    "labels under a language model": (
        "a.csv", "text,label\ngood,1\nbad,0\n", {}, DataError, r"has a label column, which a language model does not learn",
    ),
    "message without content": (
        "a.jsonl", lines([*CHATS, {"messages": [*CHATS[0]["messages"], {"role": "user"}]}]), {}, DataError,
        r"data.source \S+a.jsonl, row 20, column 'messages', message 2: every message needs 'role' and 'content'",
    ),
    "tool call without a template": (
        "a.jsonl", lines([*CHATS, {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]}]), {"eval_fraction": 0},
        DataError, r"data.source \S+a.jsonl, row 20, message 1 .assistant.: the default chat template \(the model has none\) does not write tool_calls",
    ),
    "held-out prompts all too long": (
        "a.jsonl",
        lines([{"instruction": "long " * 200, "output": "x"} for _ in range(30)]) + lines([{"instruction": "a", "output": "b"}]),
        {"max_length": 32, "seed": 1}, DataError, r"no held-out row has a scored token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_it_is_refused(tmp_path: Path, mistake: str) -> None:
    name, content, data, kind, words = REFUSED[mistake]
    with pytest.raises(kind, match=words):
        facts_of(tmp_path, name, content, data)


def test_a_parquet_column_that_occurs_twice_is_refused_before_the_launch(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table([["a"], ["b"], ["c"]], names=["instruction", "output", "output"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'output' occurs 2 times"):
        check_request(parse_spec(tiny_spec(tmp_path / "a.parquet", tmp_path)))


def test_a_template_without_a_response_is_refused_unless_all_is_to_be_trained(tmp_path: Path) -> None:
    data = {"template": str(tmp_path / "t.jinja")}
    for prompt in ("{{ instruction }} ", "{% block prompt %}{{ instruction }}{% endblock %}"):
        (tmp_path / "t.jinja").write_text(prompt + "{{ output }}")
        with pytest.raises(DataError, match=r"no block named response.*data.mask_prompt: false"):
            facts_of(tmp_path, "a.jsonl", lines(GOOD), data)
        assert facts_of(tmp_path, "a.jsonl", lines(GOOD), {**data, "mask_prompt": False}).rows_train == 32


@pytest.mark.parametrize("value", [None, "", "  ", float("nan")])
def test_rows_without_a_response_are_left_out_and_told_with_their_numbers(tmp_path: Path, value: Any) -> None:
    rows = [{**row, "output": value} if i in (3, 7) else row for i, row in enumerate(GOOD)]
    facts = facts_of(tmp_path, "a.jsonl", lines(rows), {})
    assert (facts.rows_empty, facts.rows_train + facts.rows_eval) == (2, 38)
    assert any("2 rows of" in text and "'output' is empty or missing (row 3, 7)" in text for text in facts.warnings)


def test_empty_texts_and_replies_are_left_out(tmp_path: Path) -> None:
    texts = lines([{"text": "some words here"}] * 30 + [{"text": ""}, {"text": None}])
    assert facts_of(tmp_path, "a.jsonl", texts, {}).rows_empty == 2
    empty = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": ""}]}
    assert facts_of(tmp_path, "b.jsonl", lines([*CHATS, empty]), {}).rows_empty == 1


def test_many_rows_cut_or_lost_are_told(tmp_path: Path) -> None:
    four = [("long " * 100, "b "), ("a", "b " * 100), ("a", "b "), ("a", "b ")]
    rows = [{"instruction": prompt, "output": reply} for prompt, reply in four * 20]
    facts = facts_of(tmp_path, "a.jsonl", lines(rows), {"max_length": 48, "eval_fraction": 0.3})
    said = " ".join(facts.warnings)
    assert "training rows are longer than data.max_length 48" in said and "left out: their prompt alone" in said
    assert "held-out rows are longer" in said and "are not scored" in said
    assert facts_of(tmp_path, "b.jsonl", lines(GOOD), {"max_length": 64}).warnings == []


def test_flash_attention_would_mix_packed_rows(tmp_path: Path) -> None:
    def plan(**sections: Any) -> None:
        spec = tiny_spec(tmp_path / "a.jsonl", tmp_path, **sections)
        spec["model"]["attention"] = "flash_attention_2"
        gpus = [Gpu(index=i, name="H100", memory_bytes=80 << 30) for i in range(2)]
        make_plan(parse_spec(spec), msgspec.structs.replace(MACHINE, gpus=gpus))

    with pytest.raises(SpecError, match=r"rows of one sequence would attend to each other.*micro_batch_size: 1"):
        plan()
    plan(train={"max_steps": 1, "micro_batch_size": 1})
    plan(data={"packing": "none"})
