"""Mistakes of users that were written down before anyone looked at the checks. Each is refused, reported, or read as it
was meant.

`benchmarks/results/blind_mistakes.tsv` is that list, and `blind_mistakes.json` says what became of each one at first,
and now. The cases here, without those that another test asserts,
go the way of a run until its ranks start; those that only ranks can notice call what the ranks call. Mistakes without
a number were met later.
"""

import gzip
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.errors import AllranksError, CheckpointError, DataError, SpecError
from allranks.nodes.preflight import check_request, check_rows
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.records import ModelSpec
from allranks.spec.validation import batch_warning, warmup_warning
from allranks.train.data.prepared import PreparedData, prepare
from allranks.utils.machine import Gpu, MachineFacts
from tests.conftest import tiny_spec
from tests.warm import allranks

MACHINE = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
TOPICS = ("arts", "politics", "sports", "tech")
ROWS = [{"instruction": f"say {i}", "input": "", "output": f"word {i}"} for i in range(40)]
NEWS = [{"text": f"{topic} news {i}", "label": topic} for i in range(12) for topic in TOPICS]
Spec = dict[str, Any]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows: list[dict[str, Any]], mark: str = ",") -> str:
    head = list(rows[0])
    return "".join(mark.join(map(str, row)) + "\n" for row in [head, *(list(row.values()) for row in rows)])


def text_spec(folder: Path, content: str | bytes | None = None, file: str = "a.jsonl", **sections: Any) -> Spec:
    content = lines(ROWS) if content is None else content
    path = folder / file
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return tiny_spec(path, folder, **sections)


def news_spec(folder: Path, content: str | bytes | None = None, file: str = "a.jsonl", **sections: Any) -> Spec:
    spec = text_spec(folder, lines(NEWS) if content is None else content, file, **sections)
    return {**spec, "model": sections.get("model", {"name": "tiny:bert"}), "adapter": {"type": "none"}}


def notes_of(spec: Spec) -> list[str]:
    """Return the notes of the way to the ranks: the checks before the launch, and the plan."""
    checked = parse_spec(spec)
    check_rows(checked, check_request(checked))
    return make_plan(checked, MACHINE).warnings


def prepared(spec: Spec, *, classifier: bool = False) -> PreparedData:
    """Return what the ranks prepare, without the checks before the launch."""
    return prepare(parse_spec(spec), Path(spec["cluster"]["cache"]), classifier=classifier, log=print)


def model_folder(folder: Path, *, classes: Sequence[str] = (), head: bool = True) -> Path:
    """Save a tiny model with its tokenizer as a Hugging Face folder; a classifier if it has classes."""
    from transformers import BertForMaskedLM

    from allranks.train.data.tokenization import train_tokenizer
    from tests.dist.making import build_model

    tokenizer = train_tokenizer([r["text"] for r in NEWS], 320, classifier=bool(classes))
    spec = ModelSpec(name="tiny:bert" if classes else "tiny:mistral")
    model: Any = build_model(spec, tokenizer, dtype="float32", labels={c: i for i, c in enumerate(classes)}, seed=1)
    for part in (tokenizer, model if head else BertForMaskedLM(model.config)):
        part.save_pretrained(folder)
    return folder


def unlink(folder: Path, pattern: str) -> Path:
    for path in list(folder.glob(pattern)):
        path.unlink()
    return folder


def eval_file(folder: Path, rows: list[dict[str, Any]]) -> Spec:
    (folder / "eval.jsonl").write_text(lines(rows))
    return {"source": str(folder / "eval.jsonl")}


def blank(every: int, value: Any, key: str = "output", rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    return [{**row, key: value} if i % every == 0 else row for i, row in enumerate(rows)]


Make = Callable[[Path], Spec]


def text(content: str | bytes | None = None, file: str = "a.jsonl", **sections: Any) -> Make:
    return lambda folder: text_spec(folder, content, file, **sections)


def news(content: str | bytes | None = None, file: str = "a.jsonl", **sections: Any) -> Make:
    return lambda folder: news_spec(folder, content, file, **sections)


def folder_of(change: Callable[[Path], object], **made: Any) -> Make:
    """With a model's folder, changed so."""

    def make(folder: Path) -> Spec:
        change(model_folder(folder / "m", **made))
        return text_spec(folder, model={"name": str(folder / "m"), "config": {}})

    return make


def halve(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)


def leave_an_adapter(folder: Path) -> None:
    unlink(folder, "*")
    (folder / "adapter_config.json").write_text("{}")


def with_template(words: str) -> Make:
    def make(folder: Path) -> Spec:
        (folder / "t.jinja").write_text(words)
        return text_spec(folder, data={"template": str(folder / "t.jinja")})

    return make


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:46\nsize 12\n"
TYPO = "{% block prompt %}{{ instrution }}{% endblock %}{% block response %}{{ output }}{% endblock %}"
TRAILING = [{**r, "label": r["label"] + " " * (i % 3 == 0)} for i, r in enumerate(NEWS)]
NUMBERS = [{**r, "label": ("1", "1.0", "2")[i % 3]} for i, r in enumerate(NEWS)]
MEASURES = [{**r, "label": i * 0.37} for i, r in enumerate(NEWS)]
RAIN = [*NEWS[:8], {"text": "rain", "label": "weather"}]
TWICE = '{"instruction": "a", "output": "b", "output": "c"}'
YES = {"role": "assistant", "content": "yes"}
CHATS: list[Spec] = [{"messages": [{"role": "user", "content": f"hi {i}"}, YES]} for i in range(20)]
REFUSED: dict[str, tuple[Make, str]] = {
    "b01-windows-1252": (text("text\nau café\n".encode("cp1252"), "a.csv"), r"not UTF-8 text at byte"),
    "b02-utf16-powershell": (text(lines(ROWS).encode("utf-16")), r"not UTF-8 text at byte 0"),
    "b03-bar-csv": (news(table(NEWS, "|"), "a.csv"), r"the columns are separated by '\|'"),
    "b06-labels-with-blanks": (news(lines(TRAILING)), r"arts, 'arts ' differ only in blanks"),
    "b06-labels-as-numbers-twice": (news(lines(NUMBERS)), r"1, 1\.0 differ only in blanks or in how a number is"),
    "b09-unknown-eval-label": (
        lambda p: news_spec(p, eval=eval_file(p, RAIN)),
        r"eval\.source .*, row 8: label 'weather' is not among those of the training rows: arts, politics",
    ),
    "b10-folder-without-tokenizer": (folder_of(lambda f: unlink(f, "tokenizer*")), r"has weights but no tokenizer"),
    "b16-eval-fraction-percent": (text(data={"eval_fraction": 5}), r"data\.eval_fraction: expected float < 1"),
    "b20-grad-norm-zero": (text(train={"max_grad_norm": 0}), r"train\.max_grad_norm: expected float > 0"),
    "b25-blank-answers": (text(lines(blank(1, " "))), r"'output' is empty or missing in every row"),
    "b27-lora-alpha-zero": (text(adapter={"alpha": 0}), r"adapter\.alpha: expected float > 0"),
    "b28-lora-r-zero": (text(adapter={"r": 0}), r"adapter\.r: expected int >= 1"),
    "b28-lora-dropout": (text(adapter={"dropout": 1.5}), r"adapter\.dropout: expected float < 1"),
    "b29-template-typo": (with_template(TYPO), r"row 0: 'instrution' is undefined; the columns are: instruction"),
    "b31-truncated-jsonl": (text(lines(ROWS)[:-20]), r"line 40: not JSON"),
    "b32-csv-unquoted-comma": (news(table(NEWS) + "ball, goal,sports\n", "a.csv"), r"line 50: the number of fields"),
    "b33-lfs-pointer": (text(LFS, "a.csv", data={"template": "text"}), r"Git LFS pointer, not the data; run git lfs"),
    "b34-regression-labels": (news(lines(MEASURES)), r"38 rows have 38 label values.*not measures"),
    "b40-adapter-as-model": (folder_of(leave_an_adapter), r"holds an adapter, not a model; merge it"),
    "b43-string-boolean": (text(data={"mask_prompt": "false"}), r"data\.mask_prompt: expected bool"),
    "b46-safetensors-truncated": (folder_of(halve), r"model\.safetensors: is truncated"),
    "b47-no-config-json": (lambda p: text_spec(p, model={"name": str(p), "config": {}}), r"no config\.json, so it is"),
    "b48-gz": (text(gzip.compress(lines(ROWS).encode()), "a.jsonl.gz"), r"unknown kind of file '\.gz'"),
    "b49-trailing-comma": (text(json.dumps(ROWS)[:-1] + ",\n]", "a.json"), r"line 2: not JSON"),
    "b50-max-steps": (text(train={"max_steps": -5}), r"train\.max_steps: expected int >= "),
    "b50-lr": (text(train={"max_steps": None, "lr": -1e-4}), r"train\.lr: expected float >=? "),
    "b50-micro-batch": (text(train={"micro_batch_size": 0}), r"train\.micro_batch_size: expected int >= "),
    "b50-eval-every": (text(eval={"every": 0}), r"eval\.every: expected int >= "),
    "b50-max-length": (text(data={"max_length": 0}), r"data\.max_length: expected int >= "),
    "b52-label-missing": (news(table(blank(5, "", "label", NEWS)), "a.csv"), r"row 0, column 'label': the label is"),
    "csv-column-twice": (text("instruction,output,output\na,b,c\n", "a.csv"), r"column 'output' occurs 2 times"),
    "tsv-column-twice": (text("text\ttext\na\tb\n", "a.tsv"), r"column 'text' occurs 2 times"),
    "json-key-twice": (text(f"[{TWICE}]", "a.json"), r"key 'output' occurs twice"),
    "jsonl-key-twice": (text(lines(ROWS) + TWICE), r"line 41: the key 'output' occurs twice"),
    "empty-file": (text(""), r"the file is empty"),
    "misspelt-role": (
        text(data={"columns": {"instructoin": "instruction"}}),
        r"'instructoin' is not used.*did you mean 'instruction'",
    ),
    "role-of-another-template": (
        text(data={"columns": {"messages": "output"}, "template": "alpaca"}),
        r"'messages' is not used",
    ),
    "labels-under-a-language-model": (
        text("text,label\ngood,1\nbad,0\n", "a.csv"),
        r"has a label column, which a language model does not learn",
    ),
    "message-without-content": (
        text(lines([*CHATS, {"messages": [*CHATS[0]["messages"], {"role": "user"}]}])),
        r"data.source \S+a.jsonl, row 20, column 'messages', message 2: every message needs 'role' and 'content'",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_it_is_refused_before_ranks_start(tmp_path: Path, mistake: str) -> None:
    make, words = REFUSED[mistake]
    with pytest.raises(AllranksError, match=words):
        notes_of(make(tmp_path))


SWAPPED = {"instruction": "output", "output": "instruction"}
NEVER = {"every": 1000, "at_end": False}
TOLD: dict[str, tuple[Make, str]] = {
    "b37-config-of-folder": (
        lambda p: text_spec(
            p,
            model={"name": str(model_folder(p / "m")), "config": {"attention_dropout": 0.9}},
            adapter={"type": "none"},
        ),
        r"model\.config is ignored \(attention_dropout\): it is only for tiny:",
    ),
    "b04-swapped-columns": (text(data={"columns": SWAPPED}), r"look swapped"),
    "b04-answer-in-the-input": (
        news(data={"columns": {"text": ["text", "label"], "label": "label"}}),
        r"text and label both read label: the input contains the answer",
    ),
    "b17-eval-fraction-huge": (text(data={"eval_fraction": 0.9}), r"only 10% of the rows are trained"),
    "b18-long-warmup": (
        text(train={"warmup_steps": 1000}),
        r"only 6 steps: the learning rate reaches 6e-05 instead of train\.lr 0\.01",
    ),
    "b19-lr-typo": (text(train={"lr": 5e5}), r"train\.lr is 500000, which makes AdamW diverge"),
    "b41-never-saved": (
        text(checkpoint={"mode": "full", **NEVER}),
        r"nothing will be saved, because at_end is false and every is not reached",
    ),
    "b41-never-evaluated": (
        lambda p: text_spec(p, eval={**eval_file(p, ROWS), **NEVER}),
        r"eval\.source will not be used",
    ),
}


@pytest.mark.parametrize("mistake", TOLD)
def test_it_is_told_before_ranks_start(tmp_path: Path, mistake: str) -> None:
    make, words = TOLD[mistake]
    notes = notes_of(make(tmp_path))
    assert [note for note in notes if re.search(words, note)], notes


def test_a_usual_spec_gets_no_note(tmp_path: Path) -> None:
    assert notes_of(text_spec(tmp_path, train={"warmup_steps": 6}, data={"columns": {"output": "output"}})) == []
    assert notes_of(news_spec(tmp_path, data={"columns": {"text": "text", "label": "label"}})) == []


def test_b08_b24_rows_that_are_trained_and_held_out_are_told(tmp_path: Path) -> None:
    same = prepared(text_spec(tmp_path, eval={"source": str(tmp_path / "a.jsonl")}))
    assert any("40 of 40 held-out rows are also training rows" in text for text in same.facts.warnings)
    twice = prepared(text_spec(tmp_path, lines(ROWS * 4), "b.jsonl"))
    assert any("held-out rows are also training rows" in text for text in twice.facts.warnings)


def test_b11_a_tokenizer_without_end_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="no end-of-text token"):
        prepared(text_spec(tmp_path, model={"name": str(folder), "config": {}}))


def test_b12_chats_for_a_tokenizer_without_chat_template_get_the_default_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    unlink(folder, "chat_template.jinja")
    data = prepared(text_spec(tmp_path, lines(CHATS), model={"name": str(folder), "config": {}}))
    assert data.facts.chat_template == "default"
    first = data.tokenizer.decode(data.train.ids[: data.train.offsets[1]])
    assert re.match(r"(<s>)?<\|user\|>\n.*\n<\|assistant\|>\n.*</s>$", first, re.DOTALL), first
    assert data.tokenizer.chat_template, "saved with the model, so that it is used at inference"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_hash": "b"}, "since it was written, the training data .* changed"),
        ({"base_hash": "b"}, "since it was written, the weights of the base model changed"),
        ({"sequences": 41}, "written with 40 training sequences, now there are 41"),
    ],
)
def test_b13_b14_a_resume_on_other_data_or_base_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    from allranks.train.checkpoint import TrainingIdentity
    from allranks.train.checkpoint.loader import require_same
    from allranks.train.distributed import SINGLE_PROCESS

    was: dict[str, Any] = {"sequences": 40, "data_hash": "a", "base_hash": "a"}
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "progress.json").write_text(json.dumps(was))
    require_same(SINGLE_PROCESS, tmp_path, TrainingIdentity(**was), allow_inexact=False)
    with pytest.raises(CheckpointError, match=words):
        require_same(SINGLE_PROCESS, tmp_path, TrainingIdentity(**{**was, **change}), allow_inexact=False)


CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}
TOO_LONG = lines([{"instruction": "long " * 200, "output": "x"}] * 30) + lines([{"instruction": "a", "output": "b"}])
REFUSED_BY_RANKS = (
    (
        text(lines([*CHATS, {"messages": [CHATS[0]["messages"][0], CALL]}]), data={"eval_fraction": 0}),
        r"data.source \S+a.jsonl, row 20, message 1 .assistant.: the default chat template "
        r"\(the model has none\) does not write tool_calls",
    ),
    (text(TOO_LONG, data={"max_length": 32, "seed": 1}), r"no held-out row has a scored token"),
    (text(data={"max_length": 3, "eval_fraction": 0}), r"no row has a trained token within data\.max_length 3"),  # b21
)


@pytest.mark.parametrize(("make", "words"), REFUSED_BY_RANKS)
def test_it_is_refused_by_the_ranks(tmp_path: Path, make: Make, words: str) -> None:
    with pytest.raises(DataError, match=words):
        prepared(make(tmp_path))


def test_a_parquet_column_that_occurs_twice_is_refused_before_the_launch(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["instruction", "output", "output"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'output' occurs 2 times"):
        notes_of(tiny_spec(tmp_path / "a.parquet", tmp_path))


def test_a_template_without_a_response_is_refused_unless_all_is_to_be_trained(tmp_path: Path) -> None:
    data = {"template": str(tmp_path / "t.jinja")}
    for prompt in ("{{ instruction }} ", "{% block prompt %}{{ instruction }}{% endblock %}"):
        (tmp_path / "t.jinja").write_text(prompt + "{{ output }}")
        with pytest.raises(DataError, match=r"no block named response.*data.mask_prompt: false"):
            prepared(text_spec(tmp_path, data=data))
        assert prepared(text_spec(tmp_path, data={**data, "mask_prompt": False})).facts.rows_train == 32


@pytest.mark.parametrize("value", [None, "", "  ", float("nan")])
def test_rows_without_a_response_are_left_out_and_told_with_their_numbers(tmp_path: Path, value: Any) -> None:
    rows = [{**row, "output": value} if i in (3, 7) else row for i, row in enumerate(ROWS)]
    facts = prepared(text_spec(tmp_path, lines(rows))).facts
    assert (facts.rows_empty, facts.rows_train + facts.rows_eval) == (2, 38)
    assert any("2 rows of" in text and "'output' is empty or missing (row 3, 7)" in text for text in facts.warnings)


def test_empty_texts_and_replies_are_left_out(tmp_path: Path) -> None:
    texts = lines([{"text": "some words here"}] * 30 + [{"text": ""}, {"text": None}])
    assert prepared(text_spec(tmp_path, texts)).facts.rows_empty == 2
    empty = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": ""}]}
    assert prepared(text_spec(tmp_path, lines([*CHATS, empty]), "b.jsonl")).facts.rows_empty == 1


def test_many_rows_cut_or_lost_are_told(tmp_path: Path) -> None:
    four = [("long " * 100, "b "), ("a", "b " * 100), ("a", "b "), ("a", "b ")]
    rows = [{"instruction": prompt, "output": reply} for prompt, reply in four * 20]
    facts = prepared(text_spec(tmp_path, lines(rows), data={"max_length": 48, "eval_fraction": 0.3})).facts
    said = " ".join(facts.warnings)
    assert "training rows are longer than data.max_length 48" in said and "left out: their prompt alone" in said
    assert "held-out rows are longer" in said and "are not scored" in said
    assert prepared(text_spec(tmp_path, data={"max_length": 64})).facts.warnings == []


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


def test_b30_rows_below_one_key_are_read(tmp_path: Path) -> None:
    assert prepared(text_spec(tmp_path, json.dumps({"version": 1, "data": ROWS}), "a.json")).facts.rows == len(ROWS)


def test_b44_a_trained_classifier_keeps_the_order_of_its_classes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", classes=["tech", "Sports", "politics", "arts"])
    facts = prepared(news_spec(tmp_path, model={"name": str(folder)}), classifier=True).facts
    assert facts.labels == {"tech": 0, "sports": 1, "politics": 2, "arts": 3}
    assert facts.warnings == []


def test_b44_other_class_names_are_told_and_b53_another_number_refused(tmp_path: Path) -> None:
    four = model_folder(tmp_path / "m", classes=["a", "b", "c", "d"])
    told = prepared(news_spec(tmp_path, model={"name": str(four)}), classifier=True).facts.warnings
    assert any("other class names than the data" in text and "arts = a" in text for text in told), told
    ids = [{**row, "label": (0, 1, 7)[i % 3]} for i, row in enumerate(NEWS)]
    said = r"its classifier has 4 classes \(a, b, c, d\), the data has 3 labels \(0, 1, 7\)"
    with pytest.raises(DataError, match=said):
        prepared(news_spec(tmp_path, lines(ids), "b.jsonl", model={"name": str(four)}), classifier=True)
    ids = [{**row, "label": (0, 1, 3)[i % 3]} for i, row in enumerate(NEWS)]
    numbered = prepared(news_spec(tmp_path, lines(ids), "c.jsonl", model={"name": str(four)}), classifier=True).facts
    assert numbered.labels == {"0": 0, "1": 1, "2": 2, "3": 3}


def test_b05_b51_a_byte_order_mark_is_no_part_of_a_column_and_a_small_set_has_a_held_out_row(tmp_path: Path) -> None:
    plain = prepared(news_spec(tmp_path, table(NEWS), "a.csv"), classifier=True)
    marked = prepared(news_spec(tmp_path, table(NEWS).encode("utf-8-sig"), "b.csv"), classifier=True)
    assert marked.facts.train_hash == plain.facts.train_hash
    facts = prepared(text_spec(tmp_path, lines(ROWS[:10]), data={"eval_fraction": 0.05})).facts
    assert (facts.rows_train, facts.rows_eval) == (9, 1)


def test_b23_a_batch_beyond_the_data_and_b18_a_warm_up_beyond_the_epochs_are_told() -> None:
    from allranks.spec.records import TrainSpec

    assert batch_warning(512, 512) is None
    assert "each is trained up to 52 times in one step" in (batch_warning(512, 10) or "")
    assert warmup_warning(TrainSpec(warmup_steps=10), 10) is None
    assert "only 9 steps" in (warmup_warning(TrainSpec(warmup_steps=10), 9) or "")


class Recorder:
    """Keep the warnings of a run."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            self.told.append(event["message"])

    def say(self, text: str) -> None: ...


def run_of(spec: Spec) -> tuple[Any, list[str]]:
    import allranks

    seen = Recorder()
    return allranks.run({**spec, "observe": {"telemetry_s": 0}}, observer=seen), seen.told


def allranks_of(*args: str) -> tuple[int, str]:
    ended = allranks(*args, timeout_s=100)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.full
def test_b45_the_figures_of_a_new_head_are_told_by_the_run(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", classes=list(TOPICS), head=False)
    result, told = run_of(news_spec(tmp_path, model={"name": str(folder)}, train={"max_steps": 0}))
    assert result.exit_code == 0, result.message
    assert any("classifier.bias, classifier.weight" in text and "are random" in text for text in told), told
    trained = model_folder(tmp_path / "t", classes=list(TOPICS))
    assert run_of(news_spec(tmp_path, model={"name": str(trained)}, train={"max_steps": 0}))[1] == []


@pytest.mark.full
def test_b23_b18_b15_b54_of_a_run(tmp_path: Path) -> None:
    train = {"max_steps": None, "epochs": 1, "global_batch_size": 512, "micro_batch_size": 4, "warmup_steps": 50}
    result, told = run_of(text_spec(tmp_path, train=train, checkpoint={"mode": "none"}))
    assert result.exit_code == 0, result.message
    assert any("one optimizer step takes 512 sequences" in text for text in told), told
    assert any("train.warmup_steps is 50, but there are only 1 steps" in text for text in told), told
    code, text = allranks_of("export", result.folder)
    assert code != 0
    assert "none was saved (checkpoint.mode none" in text
    saved, _ = run_of(text_spec(tmp_path, train={"max_steps": 2}))
    code, text = allranks_of("export", saved.folder, "--step", "3")
    assert (code, "existing steps: 2" in text) == (2, True)
