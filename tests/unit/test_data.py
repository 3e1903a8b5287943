"""Rows to sequences: sources, what users' files look like, templates, masks, packing, order, and the built-in sets."""

import copy
import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from allranks.errors import DataError, SpecError
from allranks.nodes import preflight
from allranks.planning.records import BatchPlan
from allranks.spec.builtin_data import BUILTIN
from allranks.spec.data_columns import NoTemplateFits
from allranks.spec.data_rows import label_map, read_examples, require_known_labels, shuffle
from allranks.spec.data_sources import load_rows, read_file, read_first_rows, source_fingerprint
from allranks.spec.data_templates import Example, Template, choose_template
from allranks.spec.loader import parse_spec
from allranks.spec.records import DataSpec, RunSpec
from allranks.train.data.batches import CHECKSUM_MODULUS, SampleOrder, rows_checksum, steps_of_epochs
from allranks.train.data.prepared import pack_isolated
from allranks.train.data.tokenization import encode_labelled, encode_text, train_tokenizer
from allranks.train.evaluation import encode_prompt
from tests.sampling import examples

Row = dict[str, Any]
ALPACA = [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "Hello"}]
# The first 300 rows of seed 42. They change when a text does, and must not with the version of Python or its hash seed.
DIGESTS = {"instructions": "401889035073903e", "news": "35bf101fb871cd13", "reviews": "3a3af822b4396a65"}


@pytest.fixture
def tokenizer() -> Any:
    words = "### Instruction: Response hello world 123 yes no user assistant system tool question answer "
    return train_tokenizer([words * 3], 400, classifier=False)


def spec_of(path: Path) -> RunSpec:
    return parse_spec({"model": {"name": "tiny:llama"}, "data": {"source": str(path), "eval_fraction": 0}})


def jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chosen(rows: list[Row], *, classifier: bool = False, **options: Any) -> Template:
    return choose_template(DataSpec(source="x.json", **options), rows, classifier=classifier)


def render(rows: list[Row], **options: Any) -> list[Example]:
    template = chosen(rows, classifier=options.get("template") == "classification", **options)
    return [template.render(row, i) for i, row in enumerate(rows)]


def parts(row: Row, tokenizer: Any) -> tuple[str, str]:
    """Return the text that is not trained, and the text that is."""
    (encoded,) = encode_text(render([row]), tokenizer, max_length=512, mask_prompt=True)
    pairs = [(int(i), m) for i, m in zip(encoded.ids, encoded.mask, strict=True)]
    untrained, trained = (tokenizer.decode([i for i, m in pairs if m == wanted]) for wanted in (0, 1))
    return untrained, trained


@pytest.mark.parametrize("name", DIGESTS)
def test_built_in_rows_are_the_same_everywhere(name: str) -> None:
    text = json.dumps(BUILTIN[name].rows(300, 42), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]
    assert BUILTIN[name].rows(50, 3) == BUILTIN[name].rows(500, 3)[:50]


@pytest.mark.parametrize(
    ("name", "n"),
    [("instructions", 5000), *(pytest.param(name, 30000, marks=pytest.mark.full) for name in ("news", "reviews"))],
)
def test_no_built_in_row_comes_twice(name: str, n: int) -> None:
    rows = [tuple(v for k, v in row.items() if k not in ("output", "label")) for row in BUILTIN[name].rows(n, 0)]
    assert len(set(rows)) == len(rows) == n > BUILTIN[name].default_rows


def test_every_file_kind_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ALPACA))
    jsonl(tmp_path / "a.jsonl", ALPACA)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "input", "output"])
        writer.writeheader()
        writer.writerows(ALPACA)
    pq.write_table(pa.Table.from_pylist(ALPACA), tmp_path / "a.parquet")
    for kind in ("json", "jsonl", "csv", "parquet"):
        assert read_file(tmp_path / f"a.{kind}") == ALPACA, kind


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
        read_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_tables_of_spreadsheets_with_another_separator(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "faq.csv"
    path.write_bytes(f'prompt{mark}"response"\r\n"Wie, wo{mark}\nwann?"{mark}Größe, 3,5\r\n'.encode("utf-8-sig"))
    assert read_file(path) == [{"prompt": f"Wie, wo{mark}\nwann?", "response": "Größe, 3,5"}] == read_first_rows(path)
    preflight.check_request(spec_of(path))
    path.write_text('"a;b",c\n1;2,3\n')
    assert read_file(path) == [{"a;b": "1;2", "c": "3"}], "a comma in the header is the separator"
    path.write_text('"a, long";b\n1,5;2\n')
    assert read_file(path) == [{"a, long": "1,5", "b": "2"}], "a comma in quotes is not"


def test_first_rows_have_values_and_mistakes_in_them_are_found(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "n": i} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_first_rows(tmp_path / "a.parquet") == rows[:20] == read_first_rows(jsonl(tmp_path / "a.jsonl", rows))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert read_first_rows(tmp_path / "none.parquet") == [{"text": ""}]
    no_json = ('{"text": "a"}\n\n{"text": b}\n', "line 3: not JSON")
    for text, words in (no_json, ('[{"text": "a"}]\n', "an object with named columns")):
        (tmp_path / "b.jsonl").write_text(text)
        with pytest.raises(DataError, match=words):
            read_first_rows(tmp_path / "b.jsonl")


def test_text_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "texts" / "b").mkdir(parents=True)
    files = {"texts/1.md": "one\n\ntwo\n", "texts/b/2.md": "three", "texts/.x.md": "no"}
    files["book.txt"] = "a\nb\r\n \nc\n\n\n"
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())

    def texts(source: str, **data: Any) -> list[str]:
        return [row["text"] for row in load_rows(DataSpec(source=f"{tmp_path}/{source}", **data))]

    assert texts("book.txt") == ["a\nb", "c"] and len(texts("book.txt", text_rows="file")) == 1
    assert texts("texts") == texts("texts/**/*.md") == ["one\n\ntwo", "three"]
    assert texts("texts", text_rows="paragraph") == ["one", "two", "three"]
    spec = spec_of(tmp_path / "texts/*.md")
    before = source_fingerprint(spec.data)  # type: ignore[arg-type]
    preflight.check_request(spec)
    (tmp_path / "texts" / "3.md").write_text("four")
    assert texts("texts/*.md") == ["one\n\ntwo", "four"]
    assert source_fingerprint(spec.data) != before  # type: ignore[arg-type]


def test_sources_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text("[]")
    for source, words in (
        (f"{tmp_path}/e.json", "empty"),
        (f"{tmp_path}/ee.json", r"did you mean .*e\.json"),
        ("builtin:instruction", "builtin:instructions"),
    ):
        with pytest.raises(DataError, match=words):
            load_rows(DataSpec(source=source))
    for names, words in (
        (["train.jsonl", "test.jsonl"], "test.jsonl looks like evaluation data"),
        (["a.jsonl", "README.md"], "files of several kinds"),
        (["x.png"], "no file below this folder has a known kind"),
    ):
        folder = tmp_path / names[0].partition(".")[0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"text": "x"}\n')
        with pytest.raises(DataError, match=words):
            load_rows(DataSpec(source=str(folder)))


def test_a_column_that_the_first_row_lacks_is_used_in_the_others(tmp_path: Path) -> None:
    pairs = [{"instruction": "Add", "output": "2"}, {"instruction": "Add", "input": "2 and 3", "output": "5"}]
    found = read_examples(spec_of(jsonl(tmp_path / "alpaca.jsonl", pairs)), classifier=False)
    assert "### Input:\n2 and 3\n" in found.train[1].prompt and "### Input" not in found.train[0].prompt
    assert found.columns == ["instruction", "output", "input"]
    chats = [{"prompt": "Hi", "response": "Yes"}, {"prompt": "Hi", "response": "No", "system": "Be rude."}]
    found = read_examples(spec_of(jsonl(tmp_path / "chats.jsonl", chats)), classifier=False)
    assert [[m["content"] for m in e.messages] for e in found.train] == [["Hi", "Yes"], ["Be rude.", "Hi", "No"]]


def test_a_first_row_without_its_response_does_not_decide_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": "q"}, {"prompt": "q", "response": "a"}, {"prompt": "r", "response": "b"}]
    spec = spec_of(jsonl(tmp_path / "rows.jsonl", rows))
    preflight.check_request(spec)
    found = read_examples(spec, classifier=False)
    assert (found.template, len(found.train), found.rows_empty) == ("chat", 2, 1)
    assert chosen([{"text": "only"}, rows[1]]).kind == "text", "the first row decides if it can"


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
    with pytest.raises(NoTemplateFits, match=r"fits the columns nr, frage; .* data\.columns: .* Jinja file") as caught:
        chosen([{"nr": 1, "frage": "W"}])
    assert "  text            text\n" in str(caught.value)
    with pytest.raises(SpecError, match="did you mean 'alpaca'"):
        render(rows, template="alpacca")
    with pytest.raises(SpecError, match="no template takes 'promt'; did you mean 'prompt'"):
        chosen([{"a": "x", "b": "y"}], columns={"promt": "a", "response": "b"})


def test_jinja_blocks_split_prompt_and_response(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% block prompt %}Q: {{ q }}\nA: {% endblock %}{% block response %}{{ a }}{% endblock %}")
    (example,) = render([{"q": "x?", "a": "y"}], template=str(path))
    assert example.turns == (("Q: x?\nA: ", False), ("y", True))
    hostile = "''.__class__.__mro__[1].__subclasses__()"
    for code, words in (("nothing", r"row 0.*nothing.*columns are: q"), (hostile, "")):
        path.write_text("{% block response %}{{ " + code + " }}{% endblock %}")
        with pytest.raises(DataError, match=words):
            render([{"q": "x?"}], template=str(path))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "{{ m['tool_calls'] | tojson if m['tool_calls'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CHATML
ONE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
SHARED = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
DEFAULT = ("<|user|>\nquestion\n<|assistant|>\n", "answer</s>")
ALPACA_PROMPT = "### Instruction:\nquestion\n\n### Input:\n2\n\n### Response:\n"


@pytest.mark.parametrize(
    ("row", "kind", "texts"),
    [
        ({"messages": ONE}, "chat", DEFAULT),
        ({"conversations": ONE}, "chat", DEFAULT),
        ({"conversations": SHARED}, "chat", DEFAULT),
        ({"prompt": "question", "response": "answer"}, "chat", DEFAULT),
        ({"prompt": "question", "completion": " 1"}, "completion", ("question", " 1</s>")),
        ({"prompt": ONE[:1], "completion": ONE[1:]}, "chat", DEFAULT),
        ({"instruction": "question", "input": "2", "output": "answer"}, "alpaca", (ALPACA_PROMPT, "answer</s>")),
        ({"text": "answer"}, "text", ("", "answer</s>")),
    ],
)
def test_it_is_read_without_configuration(tokenizer: Any, row: Row, kind: str, texts: tuple[str, str]) -> None:
    template = chosen([{**row, "id": 4}])
    words = f"column{'s' if len(row) > 1 else ''} {', '.join(row)}"
    assert (template.kind, template.reason, parts(row, tokenizer)) == (kind, words, texts)


def test_speakers_and_their_roles() -> None:
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("tool", "t"), ("observation", "o"), ("gpt", "c")]
    (example,) = render([{"conversations": [{"from": who, "value": what} for who, what in said]}])
    assert [m["role"] for m in example.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    wrong = r"row 0, column 'conversations', message 0: unknown speaker 'npc' in 'from' \(known: human"
    with pytest.raises(DataError, match=wrong):
        render([{"conversations": [{"from": "npc", "value": "x"}]}])


def test_replies_are_trained_and_tools_and_users_are_not(tokenizer: Any) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat = [
        {"role": "system", "content": "system"},
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "ipython", "content": "3", "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "answer"}]},
    ]
    tokenizer.chat_template = LLAMA3
    untrained, trained = parts({"messages": chat}, tokenizer)
    assert trained == f"{json.dumps(calls)}</s>answer</s>" and "ipython" in untrained
    (example,) = render([{"messages": chat}])
    assert example.messages[2]["tool_calls"] == calls and "name" not in example.messages[3]
    tokenizer.chat_template = STRICT
    wrong = r"row -1: .* refuses these messages \(roles system, user, .*Only user and assistant"
    with pytest.raises(DataError, match=wrong):
        parts({"messages": chat}, tokenizer)
    with pytest.raises(DataError, match="a part of type 'image'; only text can be trained"):
        render([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}])


def test_messages_of_a_prompt_are_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = STRICT
    row = {"prompt": [*ONE, {"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "3"}]}
    assert parts(row, tokenizer) == ("[user]question[assistant]answer</s>[user]2[assistant]", "3</s>")


def test_system_and_tools_have_columns_of_their_own(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOLS
    row = {"system": "be 1", "conversations": ONE, "tools": '[{"name": "add"}]'}
    untrained, trained = parts(row, tokenizer)
    assert untrained.startswith('<tools>[{"name": "add"}]</tools><|im_start|>system\nbe 1<|im_end|>\n<|im_start|>user')
    assert trained == "answer<|im_end|>\n</s>"
    untrained, _ = parts({"system": "be 1", "prompt": "question", "response": "answer"}, tokenizer)
    assert untrained.startswith("<|im_start|>system\nbe 1<|im_end|>\n<|im_start|>user\nquestion")
    with pytest.raises(DataError, match="row 0, column 'tools': expected a list of tools"):
        render([{**row, "tools": "add"}])


def test_only_the_response_is_trained(tokenizer: Any) -> None:
    assert parts(ALPACA[0], tokenizer) == (render(ALPACA)[0].prompt, "3</s>")
    assert parts(ALPACA[1], tokenizer)[1] == "Hello</s>"
    assert all(row.mask.all() for row in encode_text(render(ALPACA), tokenizer, max_length=512, mask_prompt=False))


def test_what_the_tokenizer_writes_before_a_text_is_written_once(tokenizer: Any) -> None:
    """Tokens that are not the beginning-of-text token, too (``[gMASK] <sop>``), before rows and before prompts."""
    two = copy.deepcopy(tokenizer)
    two.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    ids = two.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    before = zip(("[gMASK]", "<sop>"), ids, strict=True)
    two.backend_tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=list(before))
    texts = [Example(turns=((text, True),)) for text in ("hello", "[gMASK]<sop>hello")]
    row, written = encode_text(texts, two, max_length=9, mask_prompt=True)
    assert row.ids.tolist() == written.ids.tolist() == [*ids, *encode_prompt(two, "hello")[2:], two.eos_token_id]
    assert row.mask.tolist() == [0, 0] + [1] * (len(row.ids) - 2)
    assert encode_prompt(two, "[gMASK]<sop>hello")[:3] == encode_prompt(two, "hello")[:3]
    assert encode_prompt(tokenizer, "hello") == tokenizer("hello")["input_ids"]


def test_chat_trains_assistant_turns_only(tokenizer: Any) -> None:
    turns = (("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"))
    messages = [{"role": role, "content": text} for role, text in turns]
    untrained, trained = parts({"messages": messages}, tokenizer)
    assert trained == "1</s>2</s>" and "two?" in untrained
    with pytest.raises(DataError, match="without an assistant"):
        parts({"messages": messages[:1]}, tokenizer)
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
