"""Whatever a file holds, lint says something about it and never fails."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.analysis.lint import lint
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN, MappedText
from tests.lint.helpers import CASES
from tests.sampling import examples

SCRIPTS = [case.script for case in CASES]
PIECES = st.sampled_from(
    [
        *"'\"\\$`;&|<>(){}#\n =,^-", "$(", "${", "$((", "))", "<<E\n", "<<-'E'\n", "\nE\n", "case x in ", ") ", ";;", " esac\n", "for i in ",
        "do ", "done\n", "srun ", "bash -c ", "torchrun ", "--nnodes=2 ", "--export=ALL,A=", "#SBATCH --nodes=", "export ", "NCCL_TIMEOUT=", "A=(",
        "$A", "${A[@]}", "${A:-", "[[ ", " ]]", "((", "MASTER_PORT=", "$RANDOM", "/tmp/x ", "python x.py ", "\r\n", "\t", "eval ", "é",
        UNRESOLVED_OPEN, UNRESOLVED_CLOSE,
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, st.sampled_from(SCRIPTS)), max_size=30).map("".join)


def _lint(content: bytes, name: str = "job.sbatch") -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        report = lint([path])
    lines = content.count(b"\n") + 1
    for finding in report.findings:
        assert 1 <= finding.line <= lines
        assert finding.column >= 1
        assert finding.message and finding.why and finding.cure
        assert UNRESOLVED_OPEN not in finding.message + finding.cure + finding.text
    assert report.findings or report.unread or not report.findings


@settings(max_examples=examples(150), deadline=None)
@given(TEXTS)
def test_any_mixture_of_shell_is_read(text: str) -> None:
    _lint(("#!/bin/bash\n" + text).encode())


@settings(max_examples=examples(80), deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["a.sh", "a.env", "a.yaml", "a", "a.sbatch"]))
def test_any_bytes_are_read_or_refused(content: bytes, name: str) -> None:
    _lint(content, name)


WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Co"]), max_size=12), min_size=1, max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(WORDS)
def test_quoted_words_come_back_as_they_were(words: list[str]) -> None:
    """shlex is the oracle of quoting, one shell deep and two."""
    reading = ShellReader()
    reading.read(MappedText("cmd " + shlex.join(words) + "\n"))
    assert [a.text for a in reading.calls[0].args] == words
    reading = ShellReader()
    reading.read(MappedText("srun bash -c " + shlex.quote("cmd " + shlex.join(words)) + "\n"))
    assert [a.text for a in reading.calls[-1].args] == words


@settings(max_examples=examples(100), deadline=None)
@given(WORDS)
def test_every_character_keeps_its_place(words: list[str]) -> None:
    text = (
        "A=" + shlex.quote(words[0]) + "\nsrun bash -c " + shlex.quote("cmd " + shlex.join(words[1:])) + '\necho "$A"\n'
    )
    reading = ShellReader()
    reading.read(MappedText(text))
    for call in reading.calls:
        for arg in call.args:
            for index, char in enumerate(arg.source.text):
                assert text[arg.source.where(index)] == char


GRAMMAR = [
    "'a'", '"b $A"', "$(ls)", "${A:-x}", "$((1+2))", "`d`", "ls ", "\n", ";", "&& ", "|| ", "| ", "(ls)", "{ ls; }", "<<E\nx $A\nE\n",
    "<<-'E'\n\tx'\n\tE\n", "case $x in a|b) ls;; (c) d;; esac\n", "for i in a b; do ls; done\n", "if [[ $a =~ (x|y) ]]; then ls; fi\n", "A=(a b)\n",
    "f() { ls; }\n", "# it's\n", "> f ", "2>&1 ", '<<< "x" ', "\\\n", "echo ", '"$(echo "x" \'y\')" ', "$'a\\'b'", "!", "(( i++ ))\n", "<(ls) ",
    "$(case x in a) ls;; esac)", '${A:-"}"}', "$(cat <<E\nit's\nE\n)", '"${A[@]}" ', "[[ a < b && ( c || d ) ]] && ls\n", "$( (ls) )", '\\"',
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(GRAMMAR), min_size=1, max_size=8).map("".join))
def test_what_bash_accepts_is_read_to_its_end(text: str) -> None:
    said = subprocess.run(["bash", "-n"], input=text + "\n", capture_output=True, text=True, timeout=20, check=False)
    accepted = said.returncode == 0
    reading = ShellReader()
    reading.read(MappedText(text + "\n"))
    if accepted:
        assert not reading.trouble


NAMES = st.from_regex(r"[A-Z][A-Z_]{0,6}", fullmatch=True)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(NAMES, st.from_regex(r"[a-z0-9./:]{0,8}", fullmatch=True)), min_size=1, max_size=8))
def test_variables_hold_what_was_last_set(pairs: list[tuple[str, str]]) -> None:
    reading = ShellReader()
    reading.read(MappedText("".join(f"{n}={v}\n" for n, v in pairs) + "".join(f'echo "${{{n}}}."\n' for n, _ in pairs)))
    last = dict(pairs)
    assert [c.args[0].text for c in reading.calls] == [last[n] + "." for n, _ in pairs]
