"""What users' files look like: rows that lack columns, tables of spreadsheets, columns with other names, files of other
kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import DataError, SpecError
from allranks.nodes import preflight
from allranks.spec.data_columns import NoTemplateFits
from allranks.spec.data_rows import read_examples
from allranks.spec.data_sources import load_rows, read_file, read_first_rows, source_fingerprint
from allranks.spec.data_templates import choose_template
from allranks.spec.loader import parse_spec
from allranks.spec.records import DataSpec, RunSpec


def spec_of(path: Path, model: str = "tiny:llama", **data: Any) -> RunSpec:
    return parse_spec({"model": {"name": model}, "data": {"source": str(path), "eval_fraction": 0, **data}})


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_column_that_the_first_row_lacks_is_used_in_the_others(tmp_path: Path) -> None:
    pairs = [{"instruction": "Add", "output": "2"}, {"instruction": "Add", "input": "2 and 3", "output": "5"}]
    found = read_examples(spec_of(jsonl(tmp_path / "alpaca.jsonl", pairs)), classifier=False)
    assert "### Input:\n2 and 3\n" in found.train[1].prompt and "### Input" not in found.train[0].prompt
    assert found.columns == ["instruction", "output", "input"]
    chats = [{"prompt": "Hi", "response": "Yes"}, {"prompt": "Hi", "response": "No", "system": "Be rude."}]
    found = read_examples(spec_of(jsonl(tmp_path / "chats.jsonl", chats)), classifier=False)
    assert [m["content"] for m in found.train[1].messages] == ["Be rude.", "Hi", "No"]
    assert [m["content"] for m in found.train[0].messages] == ["Hi", "Yes"]


def test_a_first_row_without_its_response_does_not_decide_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": "q"}, {"prompt": "q", "response": "a"}, {"prompt": "r", "response": "b"}]
    spec = spec_of(jsonl(tmp_path / "rows.jsonl", rows))
    preflight.check_request(spec)
    found = read_examples(spec, classifier=False)
    assert (found.template, len(found.train), found.rows_empty) == ("chat", 2, 1)
    mixed = [{"text": "only"}, {"prompt": "q", "response": "a"}]
    assert choose_template(DataSpec(source="x"), mixed, classifier=False).kind == "text", (
        "the first row decides if it can"
    )


@pytest.mark.parametrize("mark", [";", "\t"])
def test_tables_of_spreadsheets_with_another_separator(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "faq.csv"
    text = f'prompt{mark}"response"\r\n"Wie, wo{mark}\nwann?"{mark}Größe, 3,5\r\n'
    path.write_bytes(text.encode("utf-8-sig"))
    wanted = [{"prompt": f"Wie, wo{mark}\nwann?", "response": "Größe, 3,5"}]
    assert read_file(path) == wanted == read_first_rows(path)
    preflight.check_request(spec_of(path))
    path.write_text('"a;b",c\n1;2,3\n')
    assert read_file(path) == [{"a;b": "1;2", "c": "3"}], "a comma in the header is the separator"
    path.write_text('"a, long";b\n1,5;2\n')
    assert read_file(path) == [{"a, long": "1,5", "b": "2"}], "a comma in quotes is not"


def test_first_rows_have_values_and_mistakes_in_them_are_found(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "n": i} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_first_rows(tmp_path / "a.parquet") == rows[:20] == read_first_rows(jsonl(tmp_path / "a.jsonl", rows))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert read_first_rows(tmp_path / "none.parquet") == [{"text": ""}]
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n\n{"text": b}\n')
    with pytest.raises(DataError, match="line 3: not JSON"):
        read_first_rows(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('[{"text": "a"}]\n')
    with pytest.raises(DataError, match="an object with named columns"):
        read_first_rows(tmp_path / "c.jsonl")


def test_columns_that_fit_no_template_are_listed_with_what_to_set() -> None:
    with pytest.raises(NoTemplateFits, match=r"fits the columns nr, frage; .* data\.columns: .* Jinja file") as caught:
        choose_template(DataSpec(source="x.json"), [{"nr": 1, "frage": "W"}], classifier=False)
    assert "  text            text\n" in str(caught.value)


def test_unknown_roles_are_explained() -> None:
    wrong = DataSpec(source="x", columns={"promt": "a", "response": "b"})
    with pytest.raises(SpecError, match="no template takes 'promt'; did you mean 'prompt'"):
        choose_template(wrong, [{"a": "x", "b": "y"}], classifier=False)


def test_text_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "texts" / "b").mkdir(parents=True)
    for name, text in (
        ("texts/1.md", "one\n\ntwo\n"),
        ("texts/b/2.md", "three"),
        ("texts/.x.md", "no"),
        ("book.txt", "a\nb\r\n \nc\n\n\n"),
    ):
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


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["train.jsonl", "test.jsonl"], "test.jsonl looks like evaluation data"),
        (["a.jsonl", "README.md"], "files of several kinds"),
        (["x.png"], "no file below this folder has a known kind"),
    ],
)
def test_folders_whose_files_do_not_belong_together_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=words):
        load_rows(DataSpec(source=str(tmp_path)))
