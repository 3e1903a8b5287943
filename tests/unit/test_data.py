"""Rows to sequences: sources, templates, masks, packing, order."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from allranks.errors import DataError, SpecError
from allranks.planning.records import BatchPlan
from allranks.spec import data_sources
from allranks.spec.data_rows import label_map, require_known_labels, shuffle
from allranks.spec.data_templates import Example, choose_template
from allranks.spec.records import DataSpec
from allranks.train.data.batches import CHECKSUM_MODULUS, SampleOrder, rows_checksum, steps_of_epochs
from allranks.train.data.prepared import pack_isolated
from allranks.train.data.tokenization import encode_labelled, encode_text, train_tokenizer
from allranks.train.evaluation import encode_prompt
from tests.conftest import shared
from tests.sampling import examples

ALPACA = [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["### Instruction: Response hello world 123 yes no " * 3], 400, classifier=False)


def render(rows: list[dict[str, Any]], **options: Any) -> list[Example]:
    data = DataSpec(source="x.json", **options)
    template = choose_template(data, rows, classifier=options.get("template") == "classification")
    return [template.render(row, i) for i, row in enumerate(rows)]


def test_every_file_kind_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.json").write_text(json.dumps(ALPACA))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r) for r in ALPACA))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "input", "output"])
        writer.writeheader()
        writer.writerows(ALPACA)
    pq.write_table(pa.Table.from_pylist(ALPACA), tmp_path / "a.parquet")
    for kind in ("json", "jsonl", "csv", "parquet"):
        assert data_sources.read_file(tmp_path / f"a.{kind}") == ALPACA, kind


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[1, 2]", "each an object"),
        ("a.json", b'{"a": 1', "line 1"),
        ("a.jsonl", b'{"a":1}\n{bad', "line 2"),
        ("a.csv", b"a,b\n1,2,3\n", "line 2"),
        ("a.json", b"\xff\xfe[]", "UTF-8"),
        ("a.parquet", b"not parquet", "Parquet"),
    ],
)
def test_damaged_files_are_named_with_their_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        data_sources.read_file(path)
    assert str(path) in str(caught.value)


def test_empty_set_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("[]")
    with pytest.raises(DataError, match="empty"):
        data_sources.load_rows(DataSpec(source=str(tmp_path / "e.json")))
    with pytest.raises(DataError, match=r"did you mean .*e\.json"):
        data_sources.load_rows(DataSpec(source=str(tmp_path / "ee.json")))
    with pytest.raises(DataError, match="builtin:instructions"):
        data_sources.load_rows(DataSpec(source="builtin:instruction"))


def test_alpaca_leaves_an_empty_input_out() -> None:
    first, second = render(ALPACA)
    assert first.prompt == "### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n"
    assert second.prompt == "### Instruction:\nHi\n\n### Response:\n"
    assert (first.answer, second.answer) == ("3", "Hello")


def test_columns_by_name_and_missing_columns() -> None:
    rows = [{"q": "Add", "a": "3", "title": "T", "text": "B", "y": 2}]
    (example,) = render(rows, template="alpaca", columns={"instruction": "q", "output": "a"})
    assert example.answer == "3"
    (labelled,) = render(rows, template="classification", columns={"text": ["title", "text"], "label": "y"})
    assert (labelled.prompt, labelled.label) == ("T\nB", "2")
    with pytest.raises(DataError, match=r"no column 'qq'.*did you mean 'q'.*columns are: q, a"):
        render(rows, template="alpaca", columns={"instruction": "qq", "output": "a"})
    with pytest.raises(DataError, match="no template fits"):
        render([{"foo": 1}])
    with pytest.raises(SpecError, match="did you mean 'alpaca'"):
        render(rows, template="alpacca")


def test_jinja_blocks_split_prompt_and_response(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% block prompt %}Q: {{ q }}\nA: {% endblock %}{% block response %}{{ a }}{% endblock %}")
    (example,) = render([{"q": "x?", "a": "y"}], template=str(path))
    assert example.turns == (("Q: x?\nA: ", False), ("y", True))
    path.write_text("{% block response %}{{ nothing }}{% endblock %}")
    with pytest.raises(DataError, match=r"row 0.*nothing.*columns are: q"):
        render([{"q": "x?"}], template=str(path))
    path.write_text("{% block response %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endblock %}")
    with pytest.raises(DataError):
        render([{"q": "x?"}], template=str(path))


def text_of(tokenizer: Any, row: Any, *, trained: bool) -> str:
    return tokenizer.decode([int(i) for i, m in zip(row.ids, row.mask, strict=True) if bool(m) == trained])


def test_only_the_response_is_trained(tokenizer: Any) -> None:
    rows = encode_text(render(ALPACA), tokenizer, max_length=512, mask_prompt=True)
    assert text_of(tokenizer, rows[0], trained=True) == "3</s>"
    assert text_of(tokenizer, rows[1], trained=True) == "Hello</s>"
    assert text_of(tokenizer, rows[0], trained=False).endswith("### Response:\n")
    unmasked = encode_text(render(ALPACA), tokenizer, max_length=512, mask_prompt=False)
    assert all(row.mask.all() for row in unmasked)


def test_what_the_tokenizer_writes_before_a_text_is_written_once(tokenizer: Any) -> None:
    """Tokens that are not the beginning-of-text token, too (``[gMASK] <sop>``), before rows and before prompts."""
    two = copy.deepcopy(tokenizer)
    two.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    ids = two.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    before = zip(("[gMASK]", "<sop>"), ids, strict=True)
    two.backend_tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=list(before))
    row, written = encode_text(
        [Example(turns=(("hello", True),)), Example(turns=(("[gMASK]<sop>hello", True),))],
        two,
        max_length=9,
        mask_prompt=True,
    )
    assert row.ids.tolist() == written.ids.tolist() == [*ids, *encode_prompt(two, "hello")[2:], two.eos_token_id]
    assert row.mask.tolist() == [0, 0] + [1] * (len(row.ids) - 2)
    assert encode_prompt(two, "[gMASK]<sop>hello")[:3] == encode_prompt(two, "hello")[:3]
    assert encode_prompt(tokenizer, "hello") == tokenizer("hello")["input_ids"]


def test_chat_trains_assistant_turns_only(tokenizer: Any) -> None:
    messages = [
        {"role": r, "content": c}
        for r, c in (("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"))
    ]
    (row,) = encode_text(render([{"messages": messages}]), tokenizer, max_length=512, mask_prompt=True)
    trained = text_of(tokenizer, row, trained=True)
    assert trained == "1</s>2</s>"
    assert "two?" in text_of(tokenizer, row, trained=False)
    with pytest.raises(DataError, match="without an assistant"):
        encode_text(render([{"messages": messages[:1]}]), tokenizer, max_length=512, mask_prompt=True)
    with pytest.raises(DataError, match="'role'"):
        render([{"messages": [{"content": "x"}]}])


def test_cut_rows_are_counted(tokenizer: Any) -> None:
    whole = encode_text(render(ALPACA), tokenizer, max_length=None, mask_prompt=True)[0]
    cut = encode_text(render(ALPACA), tokenizer, max_length=5, mask_prompt=True)[0]
    assert (len(cut.ids), cut.cut_tokens) == (5, len(whole.ids) - 5)


def test_labels_are_ordered_and_unknown_ones_refused() -> None:
    tokenizer = train_tokenizer(["a b c"], 300, classifier=True)
    examples = [Example(turns=(("a b", False),), label=value) for value in ("10", "2", "1")]
    labels = label_map(examples)
    assert labels == {"1": 0, "2": 1, "10": 2}
    rows = encode_labelled(examples, tokenizer, labels, max_length=3)
    assert [r.label for r in rows] == [2, 1, 0]
    assert tokenizer.decode(rows[0].ids).startswith("[CLS]")
    with pytest.raises(DataError, match="'9'"):
        require_known_labels([Example(turns=(("a", False),), label="9", row=4)], labels, "data.source rows.csv")
    with pytest.raises(DataError, match="at least two"):
        label_map(examples[:1])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(0, 5))
def test_packing_keeps_every_row_once_and_fits(lengths: list[int], seed: int) -> None:
    packs = pack_isolated(lengths, 64, seed)
    assert sorted(r for p in packs for r in p) == list(range(len(lengths)))
    assert all(sum(lengths[r] for r in p) <= 64 for p in packs)
    assert len(packs) <= np.ceil(sum(lengths) / 64 * 1.23) + 1


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(4, 100), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_ranks_share_each_batch_and_an_epoch_exactly(n: int, world: int, micro: int, accum: int, step: int) -> None:
    batch = BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * accum * world)
    orders = [SampleOrder(n, 7, batch, r, world) for r in range(world)]
    mine = [int(row) for o in orders for part in o.micro_batches(step) for row in part]
    assert sorted(mine) == sorted(orders[0].global_batch(step).tolist())
    assert sorted(row for o in orders for row in o.first_epoch().tolist()) == list(range(n))
    first = [row for o in orders for row in o.first_epoch(max_steps=2).tolist()]
    assert len(first) == len(set(first)) == orders[0].positions_in(2)
    total = sum(rows_checksum(np.concatenate(o.micro_batches(step))) for o in orders)
    assert total % CHECKSUM_MODULUS == orders[0].planned_checksum(step)
    assert rows_checksum([*mine[1:], mine[0]]) == rows_checksum(mine) != rows_checksum([*mine[1:], n])


def test_order_does_not_depend_on_the_number_of_ranks() -> None:
    four = SampleOrder(50, 1, BatchPlan(micro_batch_size=1, grad_accum=1, global_batch_size=4), 0, 4)
    two = SampleOrder(50, 1, BatchPlan(micro_batch_size=1, grad_accum=2, global_batch_size=4), 1, 2)
    assert all((four.global_batch(s) == two.global_batch(s)).all() for s in range(30))
    assert sorted(four.at(np.arange(50)).tolist()) == list(range(50))
    assert (four.at(np.arange(50)) != four.at(np.arange(50, 100))).any()


def test_more_ranks_than_sequences_is_refused() -> None:
    with pytest.raises(DataError, match="3 training sequences for 4 ranks"):
        SampleOrder(3, 1, BatchPlan(micro_batch_size=1, grad_accum=1, global_batch_size=4), 0, 4)


def test_shuffle_is_fixed_for_all_time() -> None:
    assert shuffle(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert sorted(shuffle(1000, 1, 2).tolist()) == list(range(1000))
    assert steps_of_epochs(10, 1.5, 4) == 4


def test_real_rows() -> None:
    rows = data_sources.read_file(shared("text", "alpaca_en.json"))
    assert len(rows) == 800
    news = data_sources.read_file(shared("text", "ag_news.csv"))
    assert len(news) == 4000
    template = choose_template(DataSpec(source="x", columns={"text": ["title", "description"]}), news, classifier=True)
    assert {template.render(r, i).label for i, r in enumerate(news)} == {"1", "2", "3", "4"}
