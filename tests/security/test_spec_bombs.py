"""Specs of a few bytes that stand for endless work are refused at once, by a message that names the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.analysis.report.run_data import read_run_data
from allranks.errors import SpecError
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.loader import MAX_DEPTH, MAX_NODES, parse_yaml
from tests.warm import allranks

HEAD = "model: {name: tiny:mistral}\ndata: {source: builtin:instructions}\n"
LIMIT_S = 20


def _doubling(unit: str) -> str:
    return "\n".join(["a0: &a0 {k: x}", *(f"a{i}: &a{i} {unit.replace('@', f'*a{i - 1}')}" for i in range(1, 40))])


BOMBS = {
    "aliases of lists": (_doubling("[@, @, @, @, @, @, @, @, @]"), "counting an alias every time"),
    "aliases of mappings": (_doubling("{a: @, b: @, c: @}"), "counting an alias every time"),
    "merge keys": (_doubling("{<<: [@, @, @, @]}"), "counting an alias every time"),
    "nested lists": ("name: " + "[" * 20_000 + "]" * 20_000, "nested deeper"),
    "nested mappings": ("name: " + "{a: " * 20_000 + "}" * 20_000, "nested deeper"),
    "an integer of 900,000 digits": ("train: {seed: " + "9" * 900_000 + "}", "a number of"),
    "a hexadecimal integer": ("train: {seed: 0x" + "f" * 900_000 + "}", "a number of"),
    "a base-60 integer": ("train: {seed: 1" + ":59" * 300_000 + "}", "a number of"),
    "a value that holds itself": ("train: &a {seed: *a}", "recursive"),
    "a list that holds itself": ("train: {seed: &a [*a]}", "recursive"),
    "a key twice": ("name: a\nname: b", "duplicate key"),
    "very many keys": ("\n".join(f"k{i}: 1" for i in range(90_000)), "more than 20000"),
    "many unknown keys": ("\n".join(f"trani{i}: 1" for i in range(9_000)), "and more"),
    "a program": ("name: !!python/object/apply:os.system ['touch PWNED']", "constructor for the tag"),
}


@pytest.mark.parametrize(("text", "word"), BOMBS.values(), ids=BOMBS.keys())
def test_bomb_is_refused_at_once(tmp_path: Path, text: str, word: str) -> None:
    """In a process of its own: without the limits most of these run for hours."""
    (tmp_path / "bomb.yaml").write_text(HEAD + text + "\n")
    done = allranks("plan", "bomb.yaml", cwd=tmp_path, timeout_s=LIMIT_S)
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith("allranks: bomb.yaml") and word in done.stderr
    assert len(done.stderr) < 5_000
    assert not (tmp_path / "PWNED").exists()


def test_profile_and_overrides_have_the_same_limits(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(_doubling("[@, @, @]"))
    (tmp_path / "spec.yaml").write_text(HEAD + "cluster: {profile: profile.yaml}\n")
    with pytest.raises(SpecError, match=r"profile.yaml.*counting an alias every time"):
        load_spec(tmp_path / "spec.yaml")
    (tmp_path / "spec.yaml").write_text(HEAD)
    with pytest.raises(SpecError, match="nested deeper"):
        load_spec(tmp_path / "spec.yaml", ["model.config=" + "[" * 1000 + "]" * 1000])


def test_spec_of_a_run_folder_is_bounded_in_its_report(tmp_path: Path) -> None:
    """The page hides values of cluster.env, and turned each into text: exponential for nested aliases."""
    code = (
        "import sys; from pathlib import Path; from allranks.analysis.report.run_data import read_run_data; from "
        "allranks.rundir.paths import RunDir; read_run_data(RunDir(Path(sys.argv[1])))"
    )
    (tmp_path / "spec.yaml").write_text(_doubling("[@, @, @, @]") + "\ncluster: {env: {A: *a39}}\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=LIMIT_S)
    assert "env" in read_run_data(RunDir(tmp_path)).spec


def test_ordinary_aliases_and_sizes_stay_allowed() -> None:
    text = "a: &a [1, 2]\nb: *a\nc: {d: *a}\n"
    assert parse_yaml(text, "x") == {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}
    count = (MAX_NODES - 10) // 2
    assert len(parse_yaml("\n".join(f"k{i}: 1" for i in range(count)), "x")) == count
    depth = MAX_DEPTH - 2
    assert parse_yaml("a: " + "[" * depth + "]" * depth, "x")
    assert parse_yaml("a: 0xffffffffffffffff\nb: 1_000\nc: 1:00:00", "x") == {"a": 2**64 - 1, "b": 1000, "c": 3600}
