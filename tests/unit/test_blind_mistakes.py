"""Mistakes of users that were written down before anyone looked at the checks. Each is refused, reported, or read as
it was meant: `benchmarks/results/blind_mistakes.tsv` is that list, and `blind_mistakes.json` says what became of each.

The cases go the way of a run until its ranks start; those that only ranks can notice call what the ranks call.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.errors import AllranksError, CheckpointError, DataError
from allranks.nodes.preflight import check_request, check_rows
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.validation import batch_warning, warmup_warning
from allranks.train.data.prepared import PreparedData, prepare
from allranks.utils.machine import MachineFacts
from tests.conftest import tiny_spec
from tests.warm import allranks

MACHINE = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
TOPICS = ("arts", "politics", "sports", "tech")
ROWS = [{"instruction": f"say {i}", "input": "", "output": f"word {i}"} for i in range(40)]
NEWS = [{"text": f"{topic} news {i}", "label": topic} for i in range(12) for topic in TOPICS]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Spec = dict[str, Any]
Rows = list[dict[str, Any]]


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows: Rows, mark: str = ",") -> str:
    return "".join(mark.join(map(str, row)) + "\n" for row in [list(rows[0]), *(list(row.values()) for row in rows)])


def written(path: Path, content: Rows | str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = lines(content) if isinstance(content, list) else content
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def text_spec(folder: Path, content: Rows | str | bytes = ROWS, file: str = "a.jsonl", **sections: Any) -> Spec:
    return tiny_spec(written(folder / file, content), folder, **sections)


def news_spec(folder: Path, content: Rows | str | bytes = NEWS, file: str = "a.jsonl", **sections: Any) -> Spec:
    spec = text_spec(folder, content, file, **sections)
    spec["model"] = sections.get("model", {"name": "tiny:bert"})
    spec["adapter"] = {"type": "none"}
    return spec


def text(*content: Any, **sections: Any) -> Callable[[Path], Spec]:
    return lambda folder: text_spec(folder, *content, **sections)


def news(*content: Any, **sections: Any) -> Callable[[Path], Spec]:
    return lambda folder: news_spec(folder, *content, **sections)


def notes_of(spec: Spec) -> list[str]:
    """Return the notes of the way to the ranks: the checks before the launch, and the plan."""
    checked = parse_spec(spec)
    check_rows(checked, check_request(checked))
    return make_plan(checked, MACHINE).warnings


def prepared(spec: Spec, *, classifier: bool = False) -> PreparedData:
    """Return what the ranks prepare, without the checks before the launch."""
    return prepare(parse_spec(spec), Path(spec["cluster"]["cache"]), classifier=classifier, log=print)


def assert_note(notes: list[str], *words: str) -> None:
    assert [text for text in notes if all(word in text for word in words)], notes


def model_folder(folder: Path, *, classes: list[str] | None = None, head: bool = True) -> Path:
    """Save a tiny model with its tokenizer as a Hugging Face folder; a classifier if it has classes."""
    import transformers as hf

    from allranks.train.data.tokenization import train_tokenizer

    tokenizer = train_tokenizer([r["text"] for r in NEWS], 320, classifier=classes is not None)
    if classes is None:
        config: Any = hf.MistralConfig(vocab_size=len(tokenizer), **SIZES, num_key_value_heads=1)
        model: Any = hf.AutoModelForCausalLM.from_config(config)
    else:
        names = {"id2label": dict(enumerate(classes)), "label2id": {c: i for i, c in enumerate(classes)}}
        kind: Any = hf.AutoModelForSequenceClassification if head else hf.AutoModelForMaskedLM
        model = kind.from_config(hf.BertConfig(vocab_size=len(tokenizer), **SIZES, **(names if head else {})))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def named(folder: Path) -> dict[str, Any]:
    return {"name": str(folder), "config": {}}


def with_file(folder: Path, name: str, change: Callable[[bytes], bytes] | None) -> dict[str, Any]:
    """The model of a folder of which files are changed, or removed."""
    for path in list(model_folder(folder).glob(name)):
        path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    return named(folder)


def with_chat(rows: Rows, *, reply: bool) -> Rows:
    def messages(row: dict[str, str]) -> Rows:
        own = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        return own[: 1 + reply]

    return [{"messages": messages(row)} for row in rows]


def eval_file(folder: Path, rows: Rows) -> Spec:
    return {"source": str(written(folder / "eval.jsonl", rows))}


def blank(every: int, value: Any, key: str = "output", rows: Rows = ROWS) -> Rows:
    return [{**row, key: value} if i % every == 0 else row for i, row in enumerate(rows)]


def labelled(label: Callable[[int, str], Any]) -> Rows:
    return [{**row, "label": label(i, row["label"])} for i, row in enumerate(NEWS)]


TYPO = "{% block prompt %}{{ instrution }}{% endblock %}{% block response %}{{ output }}{% endblock %}"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:46\nsize 12\n"
LISTED = "[\n" + "".join(json.dumps(r) + ",\n" for r in ROWS) + "]"

REFUSED: dict[str, tuple[Callable[[Path], Spec], str]] = {
    "b01-windows-1252": (text("text\nau café\n".encode("cp1252"), "a.csv"), r"not UTF-8 text at byte"),
    "b02-utf16-powershell": (text(lines(ROWS).encode("utf-16")), r"not UTF-8 text at byte 0"),
    "b03-bar-csv": (news(table(NEWS, "|"), "a.csv"), r"the columns are separated by '\|'"),
    "b06-blanks": (news(labelled(lambda i, label: label + " " * (i % 3 == 0))), r"arts, 'arts ' differ only in blanks"),
    "b06-numbers": (news(labelled(lambda i, _: ("1", "1.0", "2")[i % 3])), r"1, 1\.0 differ .*how a number is written"),
    "b09-unknown-eval-label": (
        lambda p: news_spec(p, eval=eval_file(p, [*NEWS[:8], {"text": "rain", "label": "weather"}])),
        r"eval\.source .*, row 8: label 'weather' is not among those of the training rows: arts, politics",
    ),
    "b10": (lambda p: text_spec(p, model=with_file(p, "tokenizer*", None)), r"has weights but no tokenizer"),
    "b25-blank-answers": (text(blank(1, " ")), r"'output' is empty or missing in every row"),
    "b29-template-typo": (
        lambda p: text_spec(p, data={"template": str(written(p / "t.jinja", TYPO))}),
        r"row 0: 'instrution' is undefined; the columns are: instruction, input, output",
    ),
    "b31-truncated-jsonl": (text(lines(ROWS)[:-20]), r"line 40: not JSON"),
    "b32-comma": (news(table(NEWS) + "ball, goal,sports\n", "a.csv"), r"line 50: the number of fields differs"),
    "b33-lfs-pointer": (text(LFS, "a.csv", data={"template": "text"}), r"Git LFS pointer, .*; run git lfs pull"),
    "b34-regression-labels": (news(labelled(lambda i, _: i * 0.37)), r"38 rows have 38 label values.*not measures"),
    "b35-one-class": (news([r for r in NEWS if r["label"] == "arts"]), r"two label values, the data has 1: arts"),
    "b39-no-assistant-turn": (text(with_chat(ROWS, reply=False)), r"row 0: chat without an assistant message"),
    "b40-adapter-as-model": (
        lambda p: text_spec(p, model=named(written(p / "m" / "adapter_config.json", "{}").parent)),
        r"holds an adapter, not a model; merge it",
    ),
    "b46-safetensors-truncated": (
        lambda p: text_spec(p, model=with_file(p / "m", "model.safetensors", lambda b: b[: len(b) // 2])),
        r"model\.safetensors: is truncated",
    ),
    "b47-no-config-json": (lambda p: text_spec(p, model=named(p)), r"no config\.json, so it is not a model"),
    "b48-gz": (text(gzip.compress(lines(ROWS).encode()), "a.jsonl.gz"), r"unknown kind of file '\.gz'"),
    "b48-folder": (lambda p: tiny_spec(p, p), r"no file below this folder has a known kind"),
    "b49-trailing-comma": (text(LISTED, "a.json"), r"line 42: not JSON"),
    "b52-no-label": (news(table(blank(5, "", "label", NEWS)), "a.csv"), r"row 0, column 'label': the label is missing"),
}
VALUES: list[tuple[str, str, str, Any, str]] = [
    ("b16", "data", "eval_fraction", 5, "float < 1"),
    ("b20", "train", "max_grad_norm", 0, "float > 0"),
    ("b27", "adapter", "alpha", 0, "float > 0"),
    ("b28", "adapter", "r", 0, "int >= 1"),
    ("b28", "adapter", "dropout", 1.5, "float < 1"),
    ("b43", "data", "mask_prompt", "false", "bool"),
    ("b50", "train", "max_steps", -5, "int >= "),
    ("b50", "train", "lr", -1e-4, "float >= "),
    ("b50", "train", "micro_batch_size", 0, "int >= "),
    ("b50", "eval", "every", 0, "int >= "),
    ("b50", "data", "max_length", 0, "int >= "),
]


@pytest.mark.parametrize(("case", "section", "key", "value", "words"), VALUES)
def test_values_are_refused_by_key(case: str, section: str, key: str, value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match=rf"{section}\.{key}: expected {words}"):
        notes_of(text_spec(tmp_path, **{section: {key: value}}))


@pytest.mark.parametrize("mistake", REFUSED)
def test_it_is_refused_before_ranks_start(tmp_path: Path, mistake: str) -> None:
    make, words = REFUSED[mistake]
    with pytest.raises(AllranksError, match=words):
        notes_of(make(tmp_path))


NOTED: dict[str, tuple[Callable[[Path], Spec], str]] = {
    "b37-config-of-folder": (
        lambda p: text_spec(p, model={**named(model_folder(p / "m")), "config": {"attention_dropout": 0.9}}),
        r"model\.config is ignored \(attention_dropout\): it is only for tiny:",
    ),
    "b04-swapped": (text(data={"columns": {"instruction": "output", "output": "instruction"}}), r"look swapped"),
    "b04-answer-in-the-input": (
        news(data={"columns": {"text": ["text", "label"], "label": "label"}}),
        r"text and label both read label: the input contains the answer",
    ),
    "b17-percent": (text(data={"eval_fraction": 0.9}), r"only 10% of the rows are trained"),
    "b18": (text(train={"warmup_steps": 1000}), r"only 6 steps: .* reaches 6e-05 instead of train\.lr 0\.01"),
    "b19-lr-typo": (text(train={"lr": 5e5}), r"train\.lr is 500000, which makes AdamW diverge"),
    "b41-never-saved": (
        text(checkpoint={"mode": "full", "every": 1000, "at_end": False}),
        r"nothing will be saved, because at_end is false and every is not reached",
    ),
    "b41-never-evaluated": (
        lambda p: text_spec(p, eval={**eval_file(p, ROWS), "every": 1000, "at_end": False}),
        r"eval\.source will not be used",
    ),
}


@pytest.mark.parametrize("mistake", NOTED)
def test_it_is_noted_before_ranks_start(tmp_path: Path, mistake: str) -> None:
    make, words = NOTED[mistake]
    notes = notes_of(make(tmp_path))
    assert [note for note in notes if re.search(words, note)], notes


def test_a_usual_spec_gets_no_note(tmp_path: Path) -> None:
    assert notes_of(text_spec(tmp_path, train={"warmup_steps": 6}, data={"columns": {"output": "output"}})) == []
    assert notes_of(news_spec(tmp_path, data={"columns": {"text": "text", "label": "label"}})) == []


def test_b08_b24_rows_that_are_trained_and_held_out_are_told(tmp_path: Path) -> None:
    same = prepared(text_spec(tmp_path, eval={"source": str(tmp_path / "a.jsonl")}))
    assert_note(same.facts.warnings, "40 of 40 held-out rows are also training rows")
    twice = prepared(text_spec(tmp_path, ROWS * 4, "b.jsonl"))
    assert_note(twice.facts.warnings, "held-out rows are also training rows")


def test_b11_a_tokenizer_without_end_is_refused(tmp_path: Path) -> None:
    def without_end(content: bytes) -> bytes:
        return json.dumps({k: v for k, v in json.loads(content).items() if k != "eos_token"}).encode()

    with pytest.raises(DataError, match="no end-of-text token"):
        prepared(text_spec(tmp_path, model=with_file(tmp_path / "m", "tokenizer_config.json", without_end)))


def test_b12_chats_for_a_tokenizer_without_chat_template_get_the_default_one(tmp_path: Path) -> None:
    model = with_file(tmp_path / "m", "chat_template.jinja", None)
    data = prepared(text_spec(tmp_path, with_chat(ROWS, reply=True), model=model))
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
    written(tmp_path / "state" / "progress.json", json.dumps(was))
    require_same(SINGLE_PROCESS, tmp_path, TrainingIdentity(**was), allow_inexact=False)
    with pytest.raises(CheckpointError, match=words):
        require_same(SINGLE_PROCESS, tmp_path, TrainingIdentity(**{**was, **change}), allow_inexact=False)


def test_b21_answers_that_do_not_fit_are_refused_and_b22_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row has a trained token within data\.max_length 3"):
        prepared(text_spec(tmp_path, data={"max_length": 3, "eval_fraction": 0}))
    rows = [{**row, "output": "word " * 50} for row in ROWS]
    told = prepared(text_spec(tmp_path, rows, data={"max_length": 60})).facts.warnings
    assert_note(told, "100% of the training rows are longer than data.max_length 60")


def test_b26_missing_answers_are_left_out_and_told(tmp_path: Path) -> None:
    for spec in (text_spec(tmp_path, blank(4, None)), text_spec(tmp_path, table(blank(4, "")), "b.csv")):
        facts = prepared(spec).facts
        assert facts.rows_empty == 10
        assert_note(facts.warnings, "10 rows of", "empty or missing (row 0, 4")


def test_b30_rows_below_one_key_are_read(tmp_path: Path) -> None:
    nested = prepared(text_spec(tmp_path, json.dumps({"version": 1, "data": ROWS}), "a.json"))
    assert nested.facts.rows == len(ROWS)


def test_b44_a_trained_classifier_keeps_the_order_of_its_classes(tmp_path: Path) -> None:
    order = ["tech", "Sports", "politics", "arts"]
    folder = model_folder(tmp_path / "m", classes=order)
    facts = prepared(news_spec(tmp_path, model={"name": str(folder)}), classifier=True).facts
    assert facts.labels == {"tech": 0, "sports": 1, "politics": 2, "arts": 3}
    assert facts.warnings == []


def test_b44_other_class_names_are_told_and_b53_another_number_refused(tmp_path: Path) -> None:
    four = model_folder(tmp_path / "m", classes=["a", "b", "c", "d"])
    told = prepared(news_spec(tmp_path, model={"name": str(four)}), classifier=True).facts.warnings
    assert_note(told, "other class names than the data", "arts = a")
    ids = labelled(lambda i, _: (0, 1, 7)[i % 3])
    with pytest.raises(DataError, match=r"has 4 classes \(a, b, c, d\), the data has 3 labels \(0, 1, 7\)"):
        prepared(news_spec(tmp_path, ids, "b.jsonl", model={"name": str(four)}), classifier=True)
    ids = labelled(lambda i, _: (0, 1, 3)[i % 3])
    numbered = prepared(news_spec(tmp_path, ids, "c.jsonl", model={"name": str(four)}), classifier=True).facts
    assert numbered.labels == {"0": 0, "1": 1, "2": 2, "3": 3}


def test_b05_b51_a_byte_order_mark_is_no_part_of_a_column_and_a_small_set_has_a_held_out_row(tmp_path: Path) -> None:
    plain = prepared(news_spec(tmp_path, table(NEWS), "a.csv"), classifier=True)
    marked = prepared(news_spec(tmp_path, table(NEWS).encode("utf-8-sig"), "b.csv"), classifier=True)
    assert marked.facts.train_hash == plain.facts.train_hash
    facts = prepared(text_spec(tmp_path, ROWS[:10], data={"eval_fraction": 0.05})).facts
    assert (facts.rows_train, facts.rows_eval) == (9, 1)


def test_b23_a_batch_beyond_the_data_and_b18_a_warm_up_beyond_the_epochs_are_told() -> None:
    from allranks.spec.records import TrainSpec

    assert batch_warning(512, 512) is None
    assert "each is trained up to 52 times in one step" in (batch_warning(512, 10) or "")
    assert warmup_warning(TrainSpec(warmup_steps=10), 10) is None
    assert "only 9 steps" in (warmup_warning(TrainSpec(warmup_steps=10), 9) or "")


def run_of(spec: Spec) -> tuple[Any, list[str]]:
    """Return the result of a run and its warnings."""
    from allranks import run

    events: list[dict[str, Any]] = []
    observer: Any = SimpleNamespace(event=events.append, say=lambda text: None)
    result = run({**spec, "observe": {"telemetry_s": 0}}, observer=observer)
    return result, [e["message"] for e in events if e["event"] == "warning"]


@pytest.mark.full
def test_b45_the_figures_of_a_new_head_are_told_by_the_run(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", classes=list(TOPICS), head=False)
    result, told = run_of(news_spec(tmp_path, model={"name": str(folder)}, train={"max_steps": 0}))
    assert result.exit_code == 0, result.message
    assert_note(told, "classifier.bias, classifier.weight", "are random")
    trained = model_folder(tmp_path / "t", classes=list(TOPICS))
    assert run_of(news_spec(tmp_path, model={"name": str(trained)}, train={"max_steps": 0}))[1] == []


@pytest.mark.full
def test_b23_b18_b15_b54_of_a_run(tmp_path: Path) -> None:
    train = {"max_steps": None, "epochs": 1, "global_batch_size": 512, "micro_batch_size": 4, "warmup_steps": 50}
    result, told = run_of(text_spec(tmp_path, train=train, checkpoint={"mode": "none"}))
    assert result.exit_code == 0, result.message
    assert_note(told, "one optimizer step takes 512 sequences")
    assert_note(told, "train.warmup_steps is 50, but there are only 1 steps")
    ended = allranks("export", result.folder, timeout_s=100)
    assert ended.returncode != 0 and "none was saved (checkpoint.mode none" in ended.stdout + ended.stderr
    saved, _ = run_of(text_spec(tmp_path, train={"max_steps": 2}))
    ended = allranks("export", saved.folder, "--step", "3", timeout_s=100)
    assert ended.returncode == 2 and "existing steps: 2" in ended.stdout + ended.stderr
