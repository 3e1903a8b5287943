"""Mistakes that are known before anything is started, and are refused then, without a run folder."""

import http.server
import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from allranks.cli.data import data_command
from allranks.errors import AllranksError, DataError, EnvironmentNotAble, RequestError, SpecError
from allranks.launch import resumption
from allranks.nodes.preflight import check_request, check_rows
from allranks.nodes.preflight.request import check_sources
from allranks.nodes.preflight.requirements import local_report
from allranks.nodes.records import require_ready
from allranks.planning.memory import fit
from allranks.planning.memory.model_config import find_files
from allranks.planning.model_checks import model_warnings, require_vocabulary
from allranks.planning.planner import make_plan
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.models import require_architecture
from allranks.utils.machine import MachineFacts
from tests.conftest import tiny_spec
from tests.dist.harness import allranks, write_spec

MACHINE = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
ROWS = [{"instruction": f"say {i}", "input": "", "output": f"word {i}"} for i in range(40)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LAYERS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
LLAMA = {"model_type": "llama", "vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": 128, **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
MAMBA = {"model_type": "mamba", "vocab_size": 300}
BERT = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 300, "max_position_embeddings": 64, **SIZES}


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write what a model's folder shows without its weights: config, tokenizer, the header of the safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {f"t{i}": i for i in range(290)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"content": "<last>", "id": 299}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    layers = [f"model.layers.{i}.{layer}.weight" for i in range(2) for layer in LAYERS]
    names = [*layers, "model.embed_tokens.weight", "lm_head.weight"]
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def before_launch(spec: dict[str, Any]) -> None:
    """Run all checks that precede the first rank, in their order."""
    parsed = parse_spec(spec)
    classifier = check_request(parsed)
    plan = make_plan(parsed, MACHINE)
    require_ready(local_report(parsed, plan, MACHINE, fit(parsed, plan, MACHINE)))
    check_sources(parsed)
    check_rows(parsed, classifier)


def lora(**more: Any) -> dict[str, Any]:
    return {"adapter": {"type": "lora", **more}}


def of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": 300, **more}


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), contents, strict=False)]}


def rows_with(number: int, **values: Any) -> list[dict[str, Any]]:
    return [row | values if i == number else row for i, row in enumerate(ROWS)]


CHATS = [chat("a", "b")] * 20
LABELLED = [{"text": f"row {i}", "label": i % 2} for i in range(40)]
NEWS = {"source": "builtin:news", "template": "classification"}
EAGER = {"model": {"attention": "eager"}}
UNPACKED = {**EAGER, "data": {"packing": "none"}}
Case = tuple[dict[str, Any] | str, dict[str, Any], list[dict[str, Any]], type[AllranksError], str]


def wrong_spec(
    words: str,
    config: dict[str, Any] | str = LLAMA,
    rows: list[dict[str, Any]] = ROWS,
    error: type[AllranksError] = SpecError,
    **sections: Any,
) -> Case:
    """Return a case: the config of the model or its name, the spec's sections, the rows; the error with its words."""
    return config, sections, rows, error, words


wrong_data = partial(wrong_spec, error=DataError)
MISTAKES: dict[str, Case] = {
    "token id beyond the vocabulary": wrong_spec(
        r"token '<last>' with the id 299, but .* ends at 249", LLAMA | {"vocab_size": 250}),
    "longer than the positions of gpt2": wrong_spec(
        r"max_length is 65, but .* has 64 positions", GPT2, data={"max_length": 65}),
    "longer than the positions of roberta": wrong_spec(
        r"has 64 positions", BERT | {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1},
        rows=LABELLED, data={"max_length": 65, "template": "classification"}),
    "encoder-decoder": wrong_spec(r"a t5 is an encoder-decoder", of_type("t5", is_encoder_decoder=True)),
    "encoder-decoder by its type": wrong_spec(r"a bart is an encoder-decoder", of_type("bart")),
    "encoder-decoder, what is supported": wrong_spec(
        r"does not train; supported are causal .*script\.path", of_type("t5")),
    "images": wrong_spec(
        r"a llama4 also reads or writes images or audio.*documentation lists the tested ones", of_type("llama4")),
    "images by the config": wrong_spec(r"a llama also reads .* images", LLAMA | {"vision_config": {"depth": 2}}),
    "images, the language model alone": wrong_spec(r"use its language model alone \(gemma3_text\)", of_type("gemma3")),
    "speech": wrong_spec(r"a whisper is an encoder-decoder", of_type("whisper", is_encoder_decoder=True)),
    "packed rows of attention that does not separate them": wrong_spec(
        r"packing is isolated, but in .* \(opt\) rows of one sequence would .*data\.packing: none",
        LLAMA | {"model_type": "opt"}),
    "packed rows of a state-space model": wrong_spec(
        r"\(mamba\) rows of one sequence.*tested with model\.attention: eager, data\.packing: none, "
        r"with LoRA adapter\.targets: \[in_proj, x_proj\]", MAMBA, **EAGER),
    "adapters everywhere in a state-space model": wrong_spec(
        r"targets null adapts every linear layer, which does not work for .* \(mamba\): PEFT refuses out_proj "
        r".*set adapter\.targets: \[in_proj, x_proj\]", MAMBA, **UNPACKED, **lora(targets=None)),
    "an adapter that PEFT refuses": wrong_spec(
        r"targets names mixer\.out_proj, which does not work", MAMBA, **UNPACKED,
        **lora(targets=["in_proj", "mixer.out_proj"])),
    "masked language model on text": wrong_data(
        r"is trained as a classifier; set data.template: classification", BERT | {"architectures": ["BertForMaskedLM"]},
        data={"template": "alpaca", "max_length": 32}),
    "bare encoder on text": wrong_data(r"is trained as a classifier", BERT, data={"max_length": 32}),
    "labels for a language model": wrong_data(
        r"is a causal language model", rows=LABELLED, data={"template": "classification"}),
    "misspelt attention": wrong_spec(r"'spda'; did you mean 'sdpa'", model={"attention": "spda"}),
    "attention that the model lacks": wrong_spec(
        r"attention sdpa: .* \(mamba\) does not have it in transformers; set model\.attention: eager", MAMBA),
    "flash attention on CPUs": wrong_spec(
        r"needs a GPU", model={"attention": "flash_attention_2"}, train={"micro_batch_size": 1}),
    "misspelt adapter target": wrong_spec(
        r"no module 'q_porj'; did you mean 'q_proj'\? \(its modules are named down_proj, embed_tokens",
        **lora(targets=["q_porj", "v_proj"])),
    "misspelt adapter target of a tiny model": wrong_spec(
        r"no module 'qproj'; did you mean 'q_proj'", "tiny:mistral", **lora(targets=["qproj"])),
    "all-linear in a list": wrong_spec(r"null adapts every linear layer", **lora(targets=["all-linear"])),
    "misspelt module to save": wrong_spec(
        r"modules_to_save: .* 'embed_token'; did you mean 'embed_tokens'", **lora(modules_to_save=["embed_token"])),
    "half of a surrogate pair": wrong_data(
        r"row 23, column 'output': character 1 is \\ud83d", rows=rows_with(23, output="a\ud83db")),
    "half of a surrogate pair in a chat": wrong_data(
        r"row 3, column 'messages'", rows=[*CHATS[:3], chat("\udc00", "b")]),
    "a list where text belongs": wrong_data(
        r"data.source .*, row 31, column 'output': expected text, found a list", rows=rows_with(31, output=["a"])),
    "chat without an answer": wrong_data(
        r"row 20: chat without an assistant message", rows=[*CHATS, chat("a")]),
    "row without a label": wrong_data(
        r"row 40, column 'label': the label is missing", BERT, rows=[*LABELLED, {"text": "a", "label": None}],
        data={"max_length": 32}),
    "one class only": wrong_data(
        r"at least two label values", BERT, rows=[row | {"label": 1} for row in LABELLED], data={"max_length": 32}),
    "package of a logger": wrong_spec(
        r"missing wandb; pip install 'allranks\[wandb\]'", error=EnvironmentNotAble, observe={"wandb": True}),
    "seed too large": wrong_spec(r"train.seed: .*4294967294", train={"seed": 2**70}),
    "data seed negative": wrong_spec(r"data.seed", data={"seed": -1}),
    "misspelt template": wrong_spec(
        r"data\.template: unknown template 'alpca'; did you mean 'alpaca'", "tiny:mistral",
        data={"source": "some/set", "template": "alpca"}),
    "template file that is not there": wrong_data(
        r"data\.template nowhere\.j2: there is no such file", "tiny:mistral",
        data={"source": "some/set", "template": "nowhere.j2"}),
    "template file of a built-in set": wrong_data(
        r"nowhere\.jinja: there is no such file", "tiny:mistral",
        data={"source": "builtin:instructions", "template": "nowhere.jinja"}),
    "misspelt column": wrong_data(
        r"there is no column 'lable' \(data\.columns\.label\); did you mean 'label'", "tiny:bert",
        data={**NEWS, "columns": {"label": "lable"}}),
    "misspelt built-in set": wrong_data(
        r"did you mean builtin:instructions", "tiny:mistral", data={"source": "builtin:instructons"}),
    "evaluation file that is not there": wrong_data(
        r"eval\.source nowhere\.json: there is no such file", "tiny:mistral", eval={"source": "nowhere.json"}),
}  # fmt: skip


def spec_of(case: Case, folder: Path) -> dict[str, Any]:
    config, sections, rows, *_ = case
    folder.mkdir(exist_ok=True)
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    rest = {k: v for k, v in sections.items() if k not in ("model", "data")}
    spec = tiny_spec(path, folder, **{"adapter": {"type": "none", "targets": None}, **rest})
    name = config if isinstance(config, str) else str(model_folder(folder / "m", config))
    spec["model"] = {"name": name, **sections.get("model", {})}
    spec["data"] = {"source": str(path), "max_length": 48, **sections.get("data", {})}
    spec["cluster"] = {**spec.get("cluster", {}), "cache": str(folder / "cache")}
    return spec


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_refused_before_the_launch(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, error, words = case = MISTAKES[mistake]
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *p: None if name == "wandb" else installed(name, *p))
    with pytest.raises(error, match=words) as refused:
        before_launch(spec_of(case, tmp_path))
    assert str(refused.value).count("\n") == 0


def good_spec(folder: Path, config: dict[str, Any] | str = LLAMA, **sections: Any) -> dict[str, Any]:
    return spec_of((config, sections, ROWS, SpecError, ""), folder)


def test_what_is_right_or_in_a_file_above_the_limit_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_launch(good_spec(tmp_path / "a"))
    check_request(parse_spec(good_spec(tmp_path, "tiny:bert", data=NEWS)))
    check_request(parse_spec(good_spec(tmp_path, "tiny:mistral", data={"source": "some/set", "template": "chat"})))
    large = spec_of(MISTAKES["a list where text belongs"], tmp_path / "b")
    monkeypatch.setattr("allranks.nodes.preflight.request.MAX_ROW_BYTES", 100)
    before_launch(large)  # the ranks read it


def test_a_script_that_is_not_there_is_refused_on_this_machine_alone(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "own.py", "there is no such file"), (tmp_path, "this is a folder")):
        with pytest.raises(AllranksError, match=words):
            check_request(parse_spec({"script": {"path": str(path)}}))
    # the nodes may see what the login side does not; they are asked
    check_request(parse_spec({"script": {"path": "/nowhere/own.py"}, "cluster": {"launcher": "slurm"}}))
    (tmp_path / "own.py").touch()
    check_request(parse_spec({"script": {"path": str(tmp_path / "own.py")}}))


def test_long_rows_of_a_rotary_model_and_an_architecture_that_no_test_covers_are_warnings(tmp_path: Path) -> None:
    spec = good_spec(tmp_path, data={"max_length": 500})
    before_launch(spec)
    (warning,) = model_warnings(parse_spec(spec))
    assert "max_length is 500" in warning and "128 positions" in warning
    assert model_warnings(parse_spec(good_spec(tmp_path / "b"))) == []
    (warning,) = model_warnings(parse_spec(good_spec(tmp_path / "c", LLAMA | {"model_type": "nemotron"})))
    assert "nemotron, which is not among the tested architectures (documentation: models)" in warning


@pytest.mark.parametrize("kind", ["opt", "mamba", "rwkv"])
def test_rows_that_are_not_packed_or_may_see_each_other_pass(kind: str) -> None:
    for packing in ("none", "wrapped"):
        spec = parse_spec({"model": {"name": "x"}, "data": {"source": "y", "packing": packing}})
        require_architecture({"model_type": kind}, spec, "model x", classifier=False)
    isolated = parse_spec({"model": {"name": "x"}, "data": {"source": "y"}})
    require_architecture({"model_type": kind}, isolated, "model x", classifier=True)
    with pytest.raises(SpecError, match="would influence each other"):
        require_architecture({"model_type": kind}, isolated, "model x", classifier=False)


def test_a_config_of_text_and_images_keeps_the_sizes_of_its_language_model(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "vocab_size": 100}}
    files = find_files(parse_spec(good_spec(tmp_path, nested)))
    with pytest.raises(SpecError, match="ends at 99"):
        require_vocabulary(files)  # type: ignore[arg-type]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does; the repository's name says how."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_HEAD(self) -> None:
        Hub.asked.append((self.path, self.headers.get("Authorization")))
        codes = {"gone": 404, "gated": 401, "broken": 500}
        self.send_response(next((code for word, code in codes.items() if word in self.path), 200))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A real HTTP server in the place of the hub, and an empty cache."""
    Hub.asked = []
    own = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
    for name in (*own, *(n for n in os.environ if n.lower() in ("http_proxy", "https_proxy", "all_proxy"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def hub_spec(folder: Path, model: str, source: str = "builtin:instructions", launcher: str = "local") -> Any:
    return parse_spec(tiny_spec(source, folder, model={"name": model}, data={}, cluster={"launcher": launcher}))


def test_a_model_that_the_hub_has_passes_with_the_users_token(hub: None, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_secret\n")
    check_sources(hub_spec(tmp_path, "org/name", "org/rows"))
    paths = ("/org/name/resolve/main/config.json", "/api/datasets/org/rows/revision/main")
    assert Hub.asked == [(path, "Bearer hf_secret") for path in paths]


def test_a_name_that_the_hub_does_not_know_is_refused(hub: None, tmp_path: Path) -> None:
    for names, words in (
        (["org/gone"], r"model.name org/gone: .* no such repository or revision"),
        (["org/gated"], r"model.name org/gated: .*HTTP 401.*HF_TOKEN"),
        (["tiny:mistral", "org/gone"], r"data.source org/gone: .* no such repository"),
    ):
        with pytest.raises(SpecError, match=words):
            check_sources(hub_spec(tmp_path, *names))
    check_sources(hub_spec(tmp_path, "org/broken"))  # troubles of its own decide nothing
    check_sources(hub_spec(tmp_path, "org/gone", launcher="slurm"))  # nodes may have another network
    snapshots = tmp_path / "cache" / "hub" / "models--org--gone" / "snapshots"
    snapshots.mkdir(parents=True)
    with pytest.raises(SpecError, match="no such repository"):
        check_sources(hub_spec(tmp_path, "org/gone"))
    (snapshots / "abc" / "config.json").mkdir(parents=True)
    check_sources(hub_spec(tmp_path, "org/gone"))


@pytest.mark.usefixtures("hub")
def test_data_asks_before_the_client_of_the_hub_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for nodes with another network: this machine reads the rows."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "spec.yaml").write_text(json.dumps(tiny_spec("org/rows", tmp_path, cluster={"launcher": "slurm"})))
    done = CliRunner().invoke(data_command, [str(tmp_path / "spec.yaml")])
    assert isinstance(done.exception, EnvironmentNotAble) and "is not reachable" in str(done.exception)


def test_a_resume_with_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    before = parse_spec(good_spec(tmp_path))
    other = model_folder(tmp_path / "other", LLAMA | {"hidden_size": 64})
    after = parse_spec({**good_spec(tmp_path / "b"), "model": {"name": str(other)}})
    run = RunDir(tmp_path / "run")
    run.checkpoint(5).mkdir(parents=True)
    plan, facts = make_plan(after, MACHINE), {"mode": "full", "world_size": 2}

    def resume(spec: Any) -> None:
        resumption.require_resumable(run, before, spec, plan, facts, 5, allow_inexact=True)

    with pytest.raises(RequestError, match=r"saved from a model with hidden_size 32 \(now 64\)"):
        resume(after)
    resume(before)
    (run.checkpoint(5) / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 16}))
    with pytest.raises(RequestError, match=r"hidden_size 16 \(now 32\)"):
        resume(before)  # the folder's content is another model now


def test_nothing_is_started_and_the_error_is_printed_once(tmp_path: Path) -> None:
    path = write_spec(tmp_path, spec_of(MISTAKES["half of a surrogate pair"], tmp_path))
    done = allranks("run", str(path), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("half of a surrogate pair") == 1 and done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_no_room_for_a_checkpoint_is_refused(tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 9 million parameters: 35 MiB of weights, 105 MiB with the moments."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=80 << 20))
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 320}

    def launch(adapter: str = "none", **checkpoint: Any) -> None:
        spec = tiny_spec(rows_file, tmp_path, checkpoint=checkpoint)
        spec["model"]["config"].update(sizes)
        before_launch({**spec, "adapter": {"type": adapter}})

    with pytest.raises(EnvironmentNotAble, match=r"about \S+ MiB are needed, 80.0 MiB are free"):
        launch(mode="full")
    launch(mode="weights_only")
    launch(mode="full", at_end=False)
    launch("lora", mode="full")


def test_packages_that_only_the_nodes_need_may_be_in_another_environment(
    tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    spec = {**tiny_spec(rows_file, tmp_path), "cluster": {"launcher": "slurm"}}
    with pytest.raises(EnvironmentNotAble, match=r"without a GPU first pip .*; or set cluster\.python"):
        before_launch(spec)
    before_launch({**spec, "cluster": {"launcher": "slurm", "python": "/shared/env"}})
