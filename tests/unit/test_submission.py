"""The copy of a user's batch script: one line behind the directives, and lint that knows the options of the command."""

import subprocess
from pathlib import Path

import pytest

from allranks.launch.slurm.submission import insert_line, preflight_line, read_submission

OWN = ("--force",)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/sh\n#SBATCH -N2\n\nset -e\ncmd\n", "#!/bin/sh\n#SBATCH -N2\n+\nset -e\ncmd\n"),
        ("#!/bin/sh\n\n#SBATCH -N2\n# why\ncmd\n#SBATCH -n3\n",
         "#!/bin/sh\n\n#SBATCH -N2\n# why\n+\ncmd\n#SBATCH -n3\n"),
        ("#!/bin/sh\n  #SBATCH -N2\ncmd", "#!/bin/sh\n  #SBATCH -N2\n+\ncmd"),
        ("#!/bin/sh\n#SBATCH -N2\n", "#!/bin/sh\n#SBATCH -N2\n+"),
        ("#!/bin/sh", "#!/bin/sh\n+"),
    ],
)  # fmt: skip
def test_the_line_stands_behind_the_directives_and_moves_no_line_if_one_is_blank(script: str, expected: str) -> None:
    text, number, added = insert_line(script, "+")
    assert text == expected and text.split("\n")[number - 1] == "+"
    assert len(text.split("\n")) - len(script.split("\n")) == added


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", [("job.sh", 4)]),
        ("-N 2 --force", [("job.sh", 4)]),  # several nodes, but python is started on the first only
        ("-N1", []),
        ("-N 1 --time=24h", []),  # sbatch says it
    ],
)
def test_lint_knows_the_options_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, found: list[tuple[str, int]]
) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n# comment\npython -m torch.distributed.run train.py\n"
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text(script)
    submission = read_submission([*options.split(), "job.sh", "-N8"], OWN)
    (tmp_path / "copy").mkdir()
    errors = [f for f in submission.lint(tmp_path / "copy").findings if f.severity == "error"]
    assert [(f.file, f.line) for f in errors] == found


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["job.sh", "a b"], True), (["gone.sh"], False), (["python.py"], False), (["own.sh"], False), (["."], False),
        (["--wrap"], False), (["--wrap", "cmd"], True),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_safely_is_passed_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], changed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "job.sh": "#!/bin/bash -l\ncmd\n",
        "python.py": "#!/usr/bin/env python3\nprint()\n",
        "own.sh": "#!/bin/bash\nscontrol show job $SLURM_JOB_ID | grep Command=\n",
    }.items():
        Path(name).write_text(text)
    (tmp_path / "private").mkdir()
    command, _ = read_submission(["--force", "-N2", *words], OWN).command(tmp_path / "private", preflight=True)
    assert command[0] == "-N2" and (command[1:] != words) == changed
    if command[1:] != words and "--wrap" not in words:
        assert Path(command[1]).stat().st_mode & 0o077 == 0
        assert (Path(command[1]).name, command[2:]) == ("job.sh", ["a b"])


@pytest.mark.parametrize(
    ("python", "code", "said"),
    [("exit 0", 0, False), ("exit 3", 3, False), ("exit 1", 0, True), ("kill -9 $$", 0, True), (None, 0, True)],
)
def test_only_a_verdict_of_the_preflight_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, code: int, said: bool
) -> None:
    program = tmp_path / "it's python"
    monkeypatch.setattr("sys.executable", str(program))
    if python is not None:
        program.write_text(f"#!/bin/sh\n{python}\n")
        program.chmod(0o755)
    for shell in (["bash", "-e"], ["sh"]):
        done = subprocess.run(shell, input=preflight_line() + "\necho on\n", capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "" if code else "on\n")
        assert ("no preflight" in done.stderr) == said
