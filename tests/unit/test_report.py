"""The run report page: what it shows, that it never fails, and that nothing in a run can break or misuse it."""

import base64
import gzip
import hashlib
import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks.analysis.report import tables
from allranks.analysis.report.charts import speed_charts, telemetry_charts, training_charts
from allranks.analysis.report.figures import MAX_POINTS, Chart, downsample
from allranks.analysis.report.html import MAX_ROWS, Table
from allranks.analysis.report.page import proof, write_report
from allranks.analysis.report.run_data import RunData, read_run_data
from allranks.analysis.report.tables import checkpoint_table, error_table, hang_table, machine_table, straggler_table
from allranks.rundir.files import read_record, write_json
from allranks.rundir.paths import RunDir
from allranks.utils.palette import ACTIVITY_COLOURS, PHASE_COLOURS, RUN_COLOURS, STATE_COLOURS, stylesheet
from tests.unit.report_runs import GIB, Maker, complete_run, failed_run


class Page(HTMLParser):
    """A page taken apart as a browser would."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(convert_charrefs=True)
        assert path is not None
        self.html = path.read_text(encoding="utf-8")
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self._inside: str | None = None
        self.feed(self.html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attrs, before = self.scripts[-1]
            self.scripts[-1] = (attrs, before + data)
        elif self._inside is None:
            self.words.append(data)

    @property
    def figures(self) -> dict[str, Any]:
        """The figures that the page draws."""
        return next(json.loads(body) for attrs, body in self.scripts if attrs.get("id") == "figures")


def chart(charts: list[Chart], id: str) -> dict[str, Any]:
    """A figure's traces by name."""
    return {trace["name"]: trace for c in charts if c.id == id for trace in c.figure["data"]}


def begun(root: Path, last: int = 10, *, ranks: int = 2, hosts: tuple[str, ...] = ("one",), **begin: Any) -> Maker:
    """A run that has begun and done its first steps."""
    make = Maker(root, ranks=ranks, hosts=hosts)
    make.begin(**begin)
    if last:
        make.steps(1, last)
    return make


def steps_of(run: RunDir, rank: int = 0) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in run.events_of(rank).read_text().splitlines()]
    return [e for e in events if e["event"] == "step"]


def test_a_complete_run_shows_all_its_parts(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    page = Page(write_report(run))
    assert write_report(run) == run.report
    for part in (
        "succeeded", "2 ranks on 1 node", "2 of 2", "515 rows, each used once", "held-out loss 7.700 → 2.100",
        "exact match 0.0 % → 50.0 %", "real tokens / s 6,494", "10 of 10 steps", "What is 2 + 2?",
        "after step 10 ✓ right", "OMP_NUM_THREADS", "307 (38% of the rows)", "The same on all 2 ranks.", "5.23.0",
        "4.6 MiB in 1 file", "4 per rank x 2 ranks x 1 accumulated = 8 sequences",
    ):  # fmt: skip
        assert part in page.text, part
    assert list(page.figures) == [
        "loss", "score", "throughput", "rank-time", "memory", "cpu", "host-memory", "network", "disk"
    ]  # fmt: skip
    assert page.text.count("✓ right") == 1
    assert not list(tmp_path.glob("demo/.report*"))


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        write_report(RunDir(tmp_path / "absent"))
    assert "No rank has written an event" in Page(write_report(RunDir(tmp_path))).text


def test_each_file_may_be_missing_or_damaged(tmp_path: Path) -> None:
    whole = complete_run(tmp_path)
    names = [str(p.relative_to(whole.root)) for p in whole.root.rglob("*") if p.is_file()]
    assert len(names) >= 9
    mixed = b'{"event": "step"}\n{"event": "eval", "step": "x"}\n'
    damage = (None, b"", b"{", b"\xff\xfe\x00", b"[[[]]]", b"null", mixed)
    for name in names:
        for content in damage:
            copy = tmp_path / "copy"
            shutil.copytree(whole.root, copy)
            (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
            assert write_report(RunDir(copy)), (name, content)
            shutil.rmtree(copy)


JUNK: list[Any] = [
    None, True, -1, 0, 1.5, 10**30, 10**400, "", "text", "\ud800", [], [None], {}, {"a": [1]}, "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_any_field_may_hold_anything(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = failed_run(tmp_path) if seed % 2 else complete_run(tmp_path)
    for path in [p for p in run.root.rglob("*.json*") if p.is_file()]:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("\n".join(json.dumps(_spoil(json.loads(line), chance)) for line in lines))
    assert write_report(run)


def _spoil(value: Any, chance: random.Random) -> Any:
    if chance.random() < 0.06:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        return {k: v if k == "event" else _spoil(v, chance) for k, v in value.items() if chance.random() > 0.02}
    return [_spoil(v, chance) for v in value] if isinstance(value, list) else value


def test_a_failure_is_named_with_its_log(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    failure = {"id": "host_oom", "rank": 1, "host": "one", "attempt": 1}
    write_json(run.metrics, {**read_record(run.metrics), "failure": failure})
    page = Page(write_report(run))
    assert "Failed rank 1 on one failed after step 4: RuntimeError: out of memory" in page.text
    assert "Diagnosis Host memory exhausted, rank 1 on host one. Request more" in page.text
    assert page.text.index("out of memory") < page.text.index("train loss")
    assert page.text.index("1 1 RuntimeError out of memory") < page.text.index("another rank had failed")
    assert "The end of the log one.rank1.log Traceback (most recent call last): File x.py RuntimeError" in page.text
    assert "\x1b" not in page.html


def test_of_a_program_of_ones_own_nothing_is_said_that_allranks_does_not_know(tmp_path: Path) -> None:
    """It has its own loop: no strategy, no proof, and no phases but its start."""
    run = failed_run(tmp_path)
    plan = json.loads(run.plan.read_text())
    with run.events_of(0).open("a") as log:
        for step in range(1, 9):
            event = {"event": "progress", "source": "log", "step": step, "loss": 54.3, "time": step}
            log.write(json.dumps(event) + "\n")
    run.plan.write_text(json.dumps({**plan, "batch": None, "max_steps": None}))
    page = Page(write_report(run))
    assert "own program" in page.text
    for words in ("Checks at step 0", "Time of the run by phase", str(plan["strategy"]), "in nats", "Real tokens"):
        assert words not in page.text, words


EVIL = "</script><script>alert(1)</script><img src=http://evil/x onerror=alert(2)>'\"&<b>"


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    make = Maker(tmp_path, "<img src=x onerror=alert(1)>", hosts=("<script>alert(3)<\\script>", "b<i>"))
    make.begin(source=EVIL, template=EVIL, labels={EVIL: 0})
    shown = [{"prompt": EVIL, "expected": EVIL, "reply": EVIL}]
    make.evaluate(0, loss=2.0, samples=shown)
    make.steps(1, 6)
    make.evaluate(6, loss=1.0, samples=shown)
    make.tell("error", only=1, type=EVIL, message=EVIL, attempt=1, echo=False)
    make.telemetry(gpus=1)
    make.run.log_of(1, "one", 1).write_text(EVIL)
    env = [{"name": EVIL, "value": EVIL, "reason": EVIL, "source": EVIL}]
    plan = {"strategy": EVIL, "warnings": [EVIL]}
    run = make.write(status="failed", message=EVIL, env=env, plan=plan, metrics={"model": EVIL})
    run.spec.write_text(EVIL)
    page = Page(write_report(run))
    assert [attrs.get("id") for attrs, _ in page.scripts] == ["figures", "plotly", None]
    assert page.text.count("alert(1)") > 10
    assert all("alert(" not in body for _, body in page.scripts[2:])
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert "<b>" in page.text  # the text itself is there, whole
    assert page.figures["cpu"]["data"][0]["name"].startswith("&lt;script&gt;")  # plotly reads tags in names


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = Page(write_report(complete_run(tmp_path)))
    links = [value or "" for _, name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    style = page.html[page.html.index("<style>") : page.html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(v for _, name, v in page.attributes if name == "content" and v and "default-src 'none'" in v)
    for attrs, body in page.scripts:
        if attrs.get("type") != "application/json":
            code = gzip.decompress(base64.b64decode(body)) if attrs.get("id") == "plotly" else body.encode()
            assert base64.b64encode(hashlib.sha256(code).digest()).decode() in policy


def test_secrets_do_not_appear(tmp_path: Path) -> None:
    token, password = "hf_" + "a1B2" * 6, "hunter2hunter2"
    make = Maker(tmp_path)
    make.begin(source=f"<{token}")
    make.evaluate(0, loss=1.0, samples=[{"prompt": token, "expected": token, "reply": token}])
    make.steps(1, 2)
    make.tell("error", only=1, type="X", message=f"403 for {token}", attempt=1, echo=False)
    make.run.log_of(1, "one", 1).write_text(f"WANDB_API_KEY={password} http://me:{password}@proxy:80/ token {token}\n")
    env = [{"name": "DB_PASSWORD", "value": password, "reason": "cluster.env", "source": "user"}]
    run = make.write(status="failed", message=f"no access with {token}", env=env)
    values = f"DB_PASSWORD: {password}\n    TOKENIZERS_PARALLELISM: 'false'\n"
    run.spec.write_text(f"name: x\ncluster:\n  env:\n    {values}")
    run.run_args.write_text(json.dumps({"command": ["allranks", "--set", f"cluster.env.DB_PASSWORD={password}"]}))
    page = Page(write_report(run))
    assert token not in page.html and password not in page.html
    assert "DB_PASSWORD" in page.text and "TOKENIZERS_PARALLELISM: 'false'" in page.text


def test_figures_hold_the_numbers_of_the_events(tmp_path: Path) -> None:
    run = complete_run(tmp_path, steps=12, ranks=3)
    zero, data = steps_of(run), read_run_data(run)
    loss = chart(training_charts(data), "loss")
    assert loss["train loss"]["x"] == [e["step"] for e in zero]
    assert loss["train loss"]["y"] == [e["loss"] for e in zero]
    assert loss["learning rate"]["y"] == [e["lr"] for e in zero]
    assert (loss["held-out loss"]["x"], loss["held-out loss"]["y"]) == ([0, 12], [7.7, 2.1])
    rates = chart(speed_charts(data), "throughput")
    each = [steps_of(run, rank) for rank in range(3)]
    for name, field in (("real", "tokens"), ("trained", "tokens_trained")):
        expected = [sum(e[i][field] for e in each) / zero[i]["step_time_s"] for i in range(12)]
        assert rates[name]["y"] == pytest.approx(expected)
    memory = chart(speed_charts(data), "memory")
    assert [v * 1024**2 for v in memory["rank 2"]["y"]] == pytest.approx([e["memory_bytes"] for e in each[2]])
    assert max(memory["highest peak so far"]["y"]) == pytest.approx(0.70 * GIB / 1024**2)
    drawn = {t["name"]: t for t in Page(write_report(run)).figures["loss"]["data"]}
    assert drawn["train loss"]["y"] == pytest.approx(loss["train loss"]["y"], rel=1e-5)


def test_steps_logged_together_are_counted_apart(tmp_path: Path) -> None:
    make = begun(tmp_path, 0, total=40)
    make.steps(1, 40, every=10)
    run = make.write()
    first = chart(speed_charts(read_run_data(run)), "throughput")["real"]["y"][0]
    total = sum(steps_of(run, rank)[0]["tokens"] for rank in (0, 1))
    assert first == pytest.approx(total / sum(steps_of(run)[0]["step_times_s"]))


def test_a_sum_over_ranks_needs_all_ranks(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    lines = run.events_of(1).read_text().splitlines()
    run.events_of(1).write_text("\n".join(line for line in lines if '"step": 7' not in line))
    assert chart(speed_charts(read_run_data(run)), "throughput")["real"]["x"] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    run.events_of(1).unlink()
    note = next(c.note for c in speed_charts(read_run_data(run)) if c.id == "throughput")
    assert "1 of 2 ranks logged no step" in note


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    make = begun(tmp_path, 9, total=20)
    make.tell("stop", step=9, reason="SIGTERM")
    make.tell("phase", name="done")
    make.time += 5000
    make.begin(attempt=2, resumed_from=6, total=20)
    make.steps(7, 20)
    make.tell("phase", name="done")
    make.telemetry()
    lines = make.run.telemetry_of("one").read_text().splitlines()
    make.run.telemetry_of("one").write_text("\n".join(lines[:6] + lines[-8:]))  # no agent ran between the attempts
    run = make.write()
    data = read_run_data(run)
    loss = chart(training_charts(data), "loss")["train loss"]
    assert loss["x"] == list(range(1, 21))
    assert loss["y"][6:] == [e["loss"] for e in steps_of(run)][9:]
    cpu = next(c for c in telemetry_charts(data) if c.id == "cpu").figure
    assert max(cpu["data"][0]["x"]) < 120 and len(cpu["layout"]["shapes"]) == 2
    page = Page(write_report(run))
    assert "stopped after step 9 (SIGTERM)" in page.text and "after step 6 20" in page.text


def test_long_runs_are_thinned_but_keep_their_peaks(tmp_path: Path) -> None:
    make = begun(tmp_path, 9000, total=9000)
    make.events[0][-3]["loss"] = 99.0
    run = make.write()
    figures = Page(write_report(run)).figures
    assert max(len(t["x"]) for f in figures.values() for t in f["data"]) <= MAX_POINTS
    raw = figures["loss"]["data"][0]
    assert max(raw["y"]) == 99 and raw["x"][0] <= 18 and raw["x"][-1] >= 8982
    assert run.report.stat().st_size < 1_500_000


def test_a_classifier_has_accuracy_and_no_perplexity(tmp_path: Path) -> None:
    make = begun(tmp_path, 0, labels={"World": 0, "Sports": 1})
    make.evaluate(0, loss=1.4, accuracy=0.25)
    make.steps(1, 10)
    make.evaluate(10, loss=0.5, accuracy=0.83)
    page = Page(write_report(make.write()))
    assert "accuracy 25.0 % → 83.0 %" in page.text and "perplexity" not in page.text
    assert page.figures["score"]["data"][0]["y"] == [0.25, 0.83]
    assert "2: World, Sports" in page.text


def test_many_ranks_and_gpus_are_drawn_as_areas(tmp_path: Path) -> None:
    make = begun(tmp_path, 0, ranks=40, hosts=tuple(f"node{i}" for i in range(20)))
    make.steps(1, 10, parts=False)
    make.telemetry(gpus=2)
    run = make.write(plan={"device": "cuda"})
    page = Page(write_report(run))
    assert {"gpu", "gpu-memory", "gpu-power", "rank-time"} <= set(page.figures)
    assert all(len(f["data"]) <= 8 for f in page.figures.values())
    assert "node19" in page.text and "node15" not in page.text and "4 of 20 nodes are left out" in page.text
    gpu = chart(telemetry_charts(read_run_data(run)), "gpu-memory")
    assert max(gpu["highest of the 40 GPUs"]["y"]) == 61 and min(gpu["lowest of the 40 GPUs"]["y"]) == 60


def test_a_failed_proof_is_not_a_tick(tmp_path: Path) -> None:
    make = begun(tmp_path, 0)
    make.events = {rank: events[:5] for rank, events in make.events.items()}
    make.tell("error", type="ProofFailed", message="the weights are not equal", attempt=1, echo=False)
    page = Page(write_report(make.write(status="failed", message="the weights are not equal")))
    assert "✗ All ranks answer failed" in page.text and "✓ All" not in page.text


# single cards, tables and charts: the rules behind what each of them shows


def texts(table: Table | None) -> list[list[str]]:
    assert table is not None
    return [[cell.text for cell in row] for row in table.rows]


def test_ranks_that_did_not_answer_are_no_tick(tmp_path: Path) -> None:
    shown = proof(read_run_data(begun(tmp_path).write(plan={"world_size": 3})))
    assert shown is not None and (shown.items[0].detail, shown.items[0].mark) == ("2 of 3", "✗")


def test_a_killed_rank_is_the_error_of_an_attempt_that_another_has_continued(tmp_path: Path) -> None:
    """It has written no event; the other rank has, and it was not at fault."""
    make = begun(tmp_path, 0)
    make.tell("error", only=0, type="DistBackendError", message="Connection closed", attempt=1, echo=True)
    end = {"rank": 1, "host": "one", "exitcode": -9, "time": make.time}
    write_json(make.run.agent_exit(1, "one"), {"failed": [end, {**end, "rank": 0, "exitcode": 1}]})
    make.begin(attempt=2, resumed_from=0)
    make.steps(1, 3)
    assert texts(error_table(read_run_data(make.write()))) == [
        ["1", "1", "SIGKILL", "the rank was killed", ""],
        ["1", "0", "DistBackendError", "Connection closed", "another rank had failed"],
    ]


def test_the_log_shown_is_that_of_the_rank_that_fell_out(tmp_path: Path) -> None:
    make = begun(tmp_path, 0)
    make.tell("error", only=0, type="RuntimeError", message="timeout", attempt=1, echo=False)
    for rank in (0, 1):
        make.run.log_of(1, "one", rank).write_text(f"last words of rank {rank}\n")
    make.run.hang(1).mkdir(parents=True)
    make.run.hang_report(1).write_text(json.dumps({"stalled": [{"rank": 1}]}))
    assert read_run_data(make.write(status="failed")).log == ("one.rank1.log", "last words of rank 1")
    make.run.hang_report(1).unlink()
    assert read_run_data(make.run).log == ("one.rank0.log", "last words of rank 0")


def test_thinning_keeps_the_lowest_and_the_highest_of_every_stretch() -> None:
    assert downsample(range(8), [5.0, 9.0, 1.0, 5.0, 5.0, 2.0, 8.0, 5.0], 4) == ([1, 2, 5, 6], [9.0, 1.0, 2.0, 8.0])


def test_what_became_of_a_checkpoint(tmp_path: Path) -> None:
    make = begun(tmp_path, 0)
    for step in (1, 2, 3):
        make.save(step)
    run = make.write()
    (run.checkpoint(1) / "manifest.json").unlink()
    run.checkpoint(1).rmdir()
    (run.checkpoint(2) / "manifest.json").unlink()
    assert [row[-1] for row in texts(checkpoint_table(read_run_data(run)))] == ["removed", "no manifest", "✓ exists"]


def test_ranks_beyond_those_shown_are_counted(tmp_path: Path) -> None:
    own = [{"rank": r, "host": "n", "own_s": 0.1, "relative": 1.0, "slow": r == 0} for r in range(MAX_ROWS + 3)]
    data = read_run_data(begun(tmp_path).write(metrics={"own_time": {"factor": 1.4, "ranks": own}}))
    pace = straggler_table(data)
    assert pace is not None and pace.note.endswith(f"3 of {MAX_ROWS + 3} ranks are left out, before the last.")
    assert (len(pace.rows), texts(pace)[0][-1]) == (MAX_ROWS, "slow: the others wait")
    stood = {"stalled": [{"rank": 1}], "waiting": [{"rank": r} for r in range(2, MAX_ROWS + 6)]}
    hang = hang_table(RunData(**{**vars(data), "hang": stood}))
    assert [row[2] for row in texts(hang)] == ["stalled", *["waits"] * (MAX_ROWS - 1)]
    assert hang is not None and "5 of 21 ranks are left out" in hang.note


def test_ranks_that_lost_their_cpu_time_are_not_called_slow(tmp_path: Path) -> None:
    own = [
        {"rank": 0, "own_s": 0.3, "relative": 1.0, "slow": False, "reason": "machine", "queued_share": 0.6},
        {"rank": 1, "own_s": 0.2, "relative": 2.0, "slow": True, "reason": "unknown"},
        {"rank": 2, "own_s": 0.1, "relative": 1.0, "slow": False, "reason": ["damaged"]},
    ]
    loads = [{"host": "a", "taken_share": 0.1, "cores": 2}, {"host": "b", "taken_share": 0.5, "others_cores": 1.25}, 3]
    links = [{"host": "a", "peer": "b", "ranks": [0, 1, "x"], "lossy": True, "resent_share": 0.04}, {"host": None}]
    metrics = {"own_time": {"ranks": own}, "machine_load": loads, "links": links}
    data = read_run_data(begun(tmp_path).write(metrics=metrics))
    said = [row[-1] for row in texts(straggler_table(data))]
    assert said == ["its CPU time was taken", "slow: the others wait; reason not known", ""]
    assert [(row[0], row[2]) for row in texts(machine_table(data))] == [("b", "50.0%"), ("a", "10.0%")]
    assert [row[-1] for row in texts(tables.link_table(data))] == ["slow", ""]
    assert machine_table(read_run_data(begun(tmp_path / "none").write(metrics={}))) is None


# all pages take their colours from one module, and a thing has the same colour on each

SOURCE = Path(allranks.__file__).parent
PAGES = sorted(p for p in SOURCE.rglob("templates/*") if p.suffix in (".j2", ".css", ".js") and "sbatch" not in p.name)


def test_every_page_defines_the_colours_that_it_uses() -> None:
    defined = {"--columns", *re.findall(r"(--[a-z0-9-]+):", stylesheet())}  # the number of columns is no colour
    for template in PAGES:
        text = template.read_text()
        assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) <= defined, template
        if "<html" in text:
            assert "<style>" in text and "{{ colours }}" in text, template
    names = {c for table in (ACTIVITY_COLOURS, PHASE_COLOURS, RUN_COLOURS, STATE_COLOURS) for c in table.values()}
    assert {name.split("/")[0] for name in names} <= defined
