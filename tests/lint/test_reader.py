"""The reader: words, quoting, here-documents, nested shells; whatever a file holds, lint says something about it."""

import importlib
import pkgutil
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allranks.analysis.lint as lint_package
from allranks.analysis.lint import lint
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.shell_lexer import lex
from allranks.analysis.lint.shell_tokens import UNRESOLVED_CLOSE, UNRESOLVED_OPEN, LineIndex, MappedText
from tests.lint.helpers import CASES
from tests.sampling import examples


def read(text: str) -> ShellReader:
    reading = ShellReader()
    reading.read(MappedText(text))
    return reading


def programs(text: str) -> list[tuple[list[str], str, list[str]]]:
    return [([u.program for u in c.under], c.program, [a.text for a in c.args]) for c in read(text).calls]


def values(text: str) -> dict[str, str]:
    return {a.name: a.value for a in read(text).assignments}


def test_continued_lines_quotes_and_comments() -> None:
    text = "srun -N 2 \\\n  --label \\\n  ls 'a b' \"c d\"e \\# f#g # a comment\n"
    assert programs(text) == [([], "srun", ["-N", "2", "--label"]), (["srun"], "ls", ["a b", "c de", "#", "f#g"])]


def test_programs_behind_others() -> None:
    text = "time srun -n1 --export ALL env -u X A=1 timeout -k 5 60 apptainer exec --nv x.sif "
    text += "python3 -u -m torch.distributed.run --nnodes 2 t.py"
    (*outer, last) = programs(text)
    assert [p for _, p, _ in outer] == ["srun", "env", "timeout", "apptainer"]
    assert last == (["srun", "env", "timeout", "apptainer"], "torchrun", ["--nnodes", "2", "t.py"])


def test_the_outer_shell_expands_double_quotes_and_the_inner_single_ones() -> None:
    reading = read("A=1\nsrun bash -c \"echo $A $B \\$C\"\nsrun sh -xeuc 'echo $A $B'\n")
    assert [[a.text for a in c.args] for c in reading.calls if c.program == "echo"] == [["1", "$B", "$C"], ["1", "$B"]]
    assert {(u.name, len(u.under)) for u in reading.uses} == {("A", 0), ("B", 0), ("C", 2), ("A", 2), ("B", 2)}


def test_variables_keep_the_place_where_they_were_set() -> None:
    text = 'PORT=29500\nEND="$HOST:$PORT"\nL="torchrun --rdzv_endpoint $END"\nsrun bash -c "$L x.py"\n'
    call = read(text).calls[-1]
    assert [a.text for a in call.args] == ["--rdzv_endpoint", "$HOST:29500", "x.py"]
    lines = LineIndex(text)
    source = call.args[1].source
    assert lines.place(source.where(source.text.index("29500"))) == (1, 6)
    assert lines.place(call.offset)[0] == 3


def test_arrays_defaults_and_appending() -> None:
    found = values('a=(x "y z")\na+=(w)\nB="${a[1]}"\nC=${D:-5}\nD=3\nE=${D:-5}$D\nF=1\nF+=2\n')
    assert (found["B"], found["C"], found["E"], found["F"]) == ("y z", "${D:-5}", "33", "12")
    assert programs('a=(-n 2)\nsrun "${a[@]}" ls\n')[0] == ([], "srun", ["-n", "2"])


def test_unquoted_variables_are_split_and_quoted_ones_are_not() -> None:
    assert programs('A="-n 2  ls"\nsrun $A\n') == [([], "srun", ["-n", "2"]), (["srun"], "ls", [])]
    assert programs('A="x y"\nls "$A"\n') == [([], "ls", ["x y"])]


def test_here_documents_are_data_unless_a_shell_reads_them() -> None:
    assert [p for _, p, _ in programs("cat <<'X' > f.txt\nexport A=1\nX\nls\n")] == ["cat", "ls"]
    reading = read("B=2\nsrun bash <<X\nexport A=$B C=\\$B\nls\nX\npwd\n")
    assert {a.name: a.value for a in reading.assignments} == {"B": "2", "A": "2", "C": "2"}
    assert [c.program for c in reading.calls] == ["srun", "bash", "ls", "pwd"]
    names = [c.program for c in read("cat > r.sh <<-'X'\n\tls\n\tX\nsrun bash r.sh\n").calls]
    assert names == ["cat", "srun", "bash", "ls"]


def test_case_for_functions_and_arithmetic() -> None:
    text = "case $1 in\n a|b) ls ;;\n (c) pwd;; *) exit;; esac\nfor i in 1 2; do (( i > 1 )) && echo $i; done\n"
    text += "f() { cd x; }\nif [[ $a =~ ^(x|y)$ ]]; then g; fi\n"
    assert [p for _, p, _ in programs(text) if p.isalpha()] == ["ls", "pwd", "exit", "echo", "cd", "g"]
    calls = read(text).calls
    assert [c.program for c in calls if c.in_loop and c.program.isalpha()] == ["echo"]
    assert [c.program for c in calls if c.in_function] == ["cd"]


def test_substitutions_are_read_where_they_stand() -> None:
    reading = read("A=$(srun -N1 hostname | head -n 1)`date`\nB=$(((X)) && echo 0)\nC=$((1 + (2)))\n")
    inside = [(c.program, c.in_substitution) for c in reading.calls if c.program != "(("][:3]
    assert inside == [("srun", True), ("hostname", True), ("head", True)]
    assert values("C=$((1 + (2)))\n")["C"] == "$((1 + (2)))"
    assert not reading.trouble


def test_a_variable_that_doubles_itself_ends() -> None:
    assert all(len(a.value) <= 20_000 for a in read("x=aaaaaaaaaa\n" + "x=$x$x\n" * 60 + "echo $x\n").assignments)


def test_truncated_text_is_told_with_its_place() -> None:
    for text, line, what in (
        ("ls\nA='x\nls\n", 2, "closing '"),
        ('ls\n\nA="x\n', 3, 'closing "'),
        ("cat <<E\nx\n", 1, "here-document"),
        ("A=$(ls\n", 1, "$("),
        ("ls\nA=${B\n", 2, "${"),
    ):
        trouble = lex(MappedText(text)).trouble
        assert trouble is not None
        assert LineIndex(text).place(trouble[0])[0] == line
        assert what in trouble[1]


def test_conditions_and_operators_around_a_command() -> None:
    calls = {c.program: c for c in read("if a; then b || c; fi\n! d\ne | f 2>&1 | g &\n").calls}
    assert {p for p, c in calls.items() if c.tested} == {"a", "d"}
    assert (calls["b"].after, calls["c"].before) == ("||", "||")
    assert (calls["e"].after, calls["f"].before, calls["g"].after) == ("|", "|", "&")
    assert calls["f"].args == ()


def test_options_of_python_before_the_module() -> None:
    text = "python3 -X dev -u -m torch.distributed.run --nnodes 2 x.py\n"
    assert programs(text)[0][1:] == ("torchrun", ["--nnodes", "2", "x.py"])
    assert programs("python train.py -m torch.distributed.run\n")[0][1] == "python"
    assert programs("accelerate config\naccelerate launch --x\n")[1][1:] == ("accelerate", ["--x"])


def test_files_written_and_run_later() -> None:
    written = ("cat > run.sh <<'X'\nls\nX\n", "tee run.sh <<'X' > log\nls\nX\n")
    for write in (*written, "cat <<'X' | sed s/a/b/ | tee run.sh\nls\nX\n"):
        names = [c.program for c in read(write + "chmod +x run.sh\nsrun ./run.sh\nbash run.sh\n").calls]
        assert names.count("ls") == (1 if write in written else 0), (write, names)


def test_many_shells_in_shells_end() -> None:
    text = "ls"
    for _ in range(12):
        text = "bash -c " + "'" + text.replace("'", "'\\''") + "'"
    assert read(text + "\n").calls[0].program == "bash"
    assert lex(MappedText("$(" * 100 + ")" * 100)).trouble is not None


def test_redirections_belong_to_no_argument() -> None:
    (call,) = read("torchrun x.py 2>/tmp/err >> out &> all < in\n").calls
    assert [a.text for a in call.args] == ["x.py"]
    targets = [(r.operator, r.target) for r in call.redirects]
    assert targets == [(">", "/tmp/err"), (">>", "out"), ("&>", "all"), ("<", "in")]


def test_options_of_srun_in_all_their_forms() -> None:
    assert programs("srun -lu -n2 ls\n")[1] == (["srun"], "ls", [])
    assert [p for _, p, _ in programs("srun -n1 a.py : -n2 b.py\n")][:2] == ["srun", "a.py"]
    assert programs('srun "$PROGRAM" x\n')[1][1:] == ("$PROGRAM", ["x"])
    assert programs("srun $OPTIONS ls\n")[1][1:] == ("ls", [])
    assert programs("exec -a name ls x\n")[0][1:] == ("ls", ["x"])


def test_what_a_nested_shell_or_a_single_command_sets_stays_there() -> None:
    assert programs("A=1\nbash -c 'A=2'\necho $A\n")[-1][2] == ["1"]
    assert programs("A=1 ls\necho $A\n")[-1][2] == ["$A"]
    assert programs("i=1\nfor i in a b; do ls; done\necho $i\n")[-1][2] == ["$i"]


def test_quotes_within_what_is_not_known_here_are_no_trouble() -> None:
    assert not read('eval "set -- $REST \'"\n').trouble
    assert read('eval "ls \'x"\n').trouble


def test_a_file_that_was_written_is_read_as_a_script_only_if_it_looks_like_one() -> None:
    def ran(name: str, head: str = "") -> list[str]:
        return [c.program for c in read(f"cat > {name} <<'X'\n{head}ls\nX\nsource {name}\n").calls]

    assert ran("run.sh")[-1] == ran("run", "#!/bin/bash\n")[-1] == "ls"
    assert ran("notes")[-1] == "source"


def _expressions(value: object) -> Iterator[Any]:
    """Yield the expressions in a value of a module, also those in tuples, lists and dicts."""
    if type(value).__name__ == "_LazyRegex":
        yield value
    elif isinstance(value, dict):
        yield from (e for pair in value.items() for part in pair for e in _expressions(part))
    elif hasattr(value, "__struct_fields__") and not isinstance(value, type):
        yield from (e for name in value.__struct_fields__ for e in _expressions(getattr(value, name)))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (e for part in value for e in _expressions(part))


def test_every_expression_compiles() -> None:
    """They compile at their first use: a mistake in a rare one would end lint on a user's script."""
    found = [
        expression
        for module in pkgutil.walk_packages(lint_package.__path__, "allranks.analysis.lint.")
        for value in vars(importlib.import_module(module.name)).values()
        for expression in _expressions(value)
    ]
    assert len(found) > 60
    for expression in found:
        assert isinstance(expression.match, Callable), expression.pattern


SCRIPTS = [case.script for case in CASES]
PIECES = st.sampled_from(
    [
        *"'\"\\$`;&|<>(){}#\n =,^-", "$(", "${", "$((", "))", "<<E\n", "<<-'E'\n", "\nE\n", "case x in ", ") ", ";;",
        " esac\n", "for i in ", "do ", "done\n", "srun ", "bash -c ", "torchrun ", "--nnodes=2 ", "--export=ALL,A=",
        "#SBATCH --nodes=", "export ", "NCCL_TIMEOUT=", "A=(", "$A", "${A[@]}", "${A:-", "[[ ", " ]]", "((",
        "MASTER_PORT=", "$RANDOM", "/tmp/x ", "python x.py ", "\r\n", "\t", "eval ", "é", UNRESOLVED_OPEN,
        UNRESOLVED_CLOSE,
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
    command = shlex.quote("cmd " + shlex.join(words[1:]))
    text = f'A={shlex.quote(words[0])}\nsrun bash -c {command}\necho "$A"\n'
    reading = ShellReader()
    reading.read(MappedText(text))
    for call in reading.calls:
        for arg in call.args:
            for index, char in enumerate(arg.source.text):
                assert text[arg.source.where(index)] == char


GRAMMAR = [
    "'a'", '"b $A"', "$(ls)", "${A:-x}", "$((1+2))", "`d`", "ls ", "\n", ";", "&& ", "|| ", "| ", "(ls)", "{ ls; }",
    "<<E\nx $A\nE\n", "<<-'E'\n\tx'\n\tE\n", "case $x in a|b) ls;; (c) d;; esac\n", "for i in a b; do ls; done\n",
    "if [[ $a =~ (x|y) ]]; then ls; fi\n", "A=(a b)\n", "f() { ls; }\n", "# it's\n", "> f ", "2>&1 ", '<<< "x" ',
    "\\\n", "echo ", '"$(echo "x" \'y\')" ', "$'a\\'b'", "!", "(( i++ ))\n", "<(ls) ", "$(case x in a) ls;; esac)",
    '${A:-"}"}', "$(cat <<E\nit's\nE\n)", '"${A[@]}" ', "[[ a < b && ( c || d ) ]] && ls\n", "$( (ls) )", '\\"',
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
