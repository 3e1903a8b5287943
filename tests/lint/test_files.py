"""Files of every kind, also broken ones, and the command as a person and as a program call it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.analysis.lint import lint
from tests.conftest import without_stdin
from tests.lint.helpers import found, lint_text
from tests.warm import allranks

SCRIPT = "#!/bin/bash\nexport NCCL_TIMEOUT=600\n"


def lint_verb(*words: object, width: int = 100, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return allranks("lint", *words, stdin=stdin, env={"COLUMNS": str(width)})


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty.sh": (b"", "empty"),
    "blank.sh": (b" \n\r\n", "empty"),
    "binary.sh": (b"\x7fELF\0\0\1" * 50, "binary"),
    "wide.sh": ("#!/bin/bash\nls\n".encode("utf-16"), "UTF-16"),
    "latin.sh": (b"#!/bin/bash\n# caf\xe9\nexport NCCL_TIMEOUT=1\n", "0xe9 is not UTF-8"),
    "cut.sh": (b"#!/bin/bash\nexport NCCL_TIMEOUT=1\nexport A='x\n", "closing '"),
    "cut.sbatch": (b"#!/bin/bash\nsrun bash <<E\nls\n", "here-document"),
    "train.py": (b"import torch\nprint(torch.__version__)\n", "neither a shell script"),
    "python.sh": (b"import os\nfor i in range(3):\n    print(i)\n", "neither a shell script"),
    "tool": (b"#!/usr/bin/env python3\nimport os\n", "not a shell script"),
    "c.csh": (b"#!/bin/csh\nsetenv A 1\n", "not a shell script"),
    "ds.json": (b'{"train_batch_size": 8}\n', "neither a shell script"),
    "Makefile": (b"RUN=$(CMD) python x.py\nifeq ($(DEV),y)\nendif\n#SBATCH -N 1\n", "this is a makefile"),
    "notes.txt": (b"The job runs on two nodes.\nIt is slow.\n", "neither a shell script"),
    "broken.yaml": (b"model: [\n", "invalid YAML"),
    "other.yaml": (b"apiVersion: v1\n", "unknown key"),
    "list.yaml": (b"- 1\n", "expected a mapping"),
    "none.env": (b"# nothing\n", "NAME=value"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str) -> None:
    content, text = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    done = lint_verb(tmp_path / name, width=400)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_folders_missing_and_huge_files(tmp_path: Path) -> None:
    huge = tmp_path / "huge.sh"
    with huge.open("wb") as file:
        file.truncate(100_000_000)
    report = lint([tmp_path, tmp_path / "no.sh", huge])
    assert [u.why.split(";")[0] for u in report.unread] == ["this is a folder", "no such file", "larger than 1000 kB"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("export NCCL_TIMEOUT=1\nexport A='x\n", 3),
        ("ls\nif true; then\n", 3),
        ("srun bash <<E\nls\n", 2),
        ("for i in a b; do ls; done\n", 0),
        ("srun -A <account> ls > <file>\n", 0),
        ("{% if a %}\nfi\n{% endif %}\n", 0),
    ],
)
def test_a_syntax_error_is_reported_with_or_without_shellcheck(
    tmp_path: Path, text: str, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/bash\n{text}")
    assert any(f.id.startswith(("SC1", "shell-syntax")) for f in lint([path]).findings) == bool(line)
    which = shutil.which
    monkeypatch.setattr(
        "shutil.which", lambda name, *args, **more: None if name == "shellcheck" else which(name, *args, **more)
    )
    lines = [f.line for f in lint([path]).findings if f.id == "shell-syntax"]
    assert lines == ([line] if line else [])


SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(SHELLCHECK is None, reason="ShellCheck is not installed (extra lint)")
def test_findings_of_shellcheck_have_their_own_codes_and_can_be_ignored(tmp_path: Path) -> None:
    text = '#!/bin/bash\nrm -r "$D/"*\n# allranks: ignore[SC2115]\nrm -r "$D/"*\necho $A\ntorchrun ${ARGS[@]} t.py\n'
    report = lint_text(tmp_path, text, "a.sh")
    assert [(f.id, f.line, f.severity) for f in report.findings if f.id.startswith("SC")] == [
        ("SC2115", 2, "warning"),
        ("SC2068", 6, "note"),
    ], "style is not reported"
    assert [(f.id, f.line) for f in report.allowed] == [("SC2115", 4)]


def test_nobody_reads_the_environment_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash runs the file that BASH_ENV names, also with -n."""
    (tmp_path / "env").write_text(f"touch {tmp_path}/made\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "env"))
    lint_text(tmp_path, "#!/bin/bash\nls\n", "a.sh")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_not_there_is_not_counted_as_read(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SCRIPT)
    done = lint_verb(tmp_path / "jbo.sh", width=400)
    assert done.returncode == 2
    assert f"not read  {tmp_path / 'jbo.sh'}: no such file; did you mean {tmp_path / 'job.sh'}?" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 file not read", "not: no findings in 1 file"
    both = lint_verb(tmp_path / "jbo.sh", tmp_path / "job.sh", width=400)
    assert (both.returncode, both.stdout.splitlines()[-1]) == (2, "1 error in 1 file; 1 file not read")


def test_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    done = lint_verb("-", tmp_path / "a.sh", "--json", stdin="PATH=/bin\nHOME=/root\nGLOO_SOCKET_IFNAME=^lo\n")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["files"] == ["standard input", str(tmp_path / "a.sh")]
    assert [(f["file"], f["id"], f["line"]) for f in document["findings"]] == [
        ("standard input", "gloo-interface-syntax", 3),
        (str(tmp_path / "a.sh"), "unknown-variable", 2),
    ]
    empty = lint_verb("-", stdin="")
    assert empty.returncode == 2 and "standard input is empty" in empty.stdout
    closed = without_stdin("lint")
    assert closed.returncode == 2 and "closed" in closed.stdout and "Traceback" not in closed.stderr


def test_exit_codes_and_levels(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text("#!/bin/bash\nexport NCCL_IB_DISABLE=1\n")
    assert lint_verb(path, "--level", "note").returncode == 1
    done = lint_verb(path)
    assert (done.returncode, done.stdout.strip()) == (0, "no findings in 1 file (1 note with --level note)")
    assert lint_verb().returncode == 2


def test_environment_files(tmp_path: Path) -> None:
    dump = (
        "SHELL=/bin/bash\nNCCL_TIMEOUT=1\nPS1=a\n  "
        "b\nPATH=/bin\nHOME=/root\nMASTER_PORT=15123\nGLOO_SOCKET_IFNAME==eth0\n"
    )
    assert found(lint_text(tmp_path, dump, "now.env")) == [("unknown-variable", 2), ("gloo-interface-syntax", 8)]
    assert found(lint_text(tmp_path, "export A=1\nexport NCCL_TIMEOUT='5'  # s\n", "settings")) == [
        ("unknown-variable", 2)
    ]
    assert found(lint_text(tmp_path, 'A=1\nNCCL_IB_DISABLE=1 # x\nNCCL_SHM_DISABLE="1"\n', "x.env")) == [
        ("transport-disabled", 2),
        ("transport-disabled", 3),
    ]
    assert found(lint_text(tmp_path, "A=1\r\nNCCL_TIMEOUT=1\r\n", "x.env")) == [("unknown-variable", 2)]
    several = "SLURM_JOB_NUM_NODES=2\nHF_HOME=/tmp/hf\n"
    assert found(lint_text(tmp_path, several, "x.env")) == [("cache-not-shared", 2)]


def test_specs(tmp_path: Path) -> None:
    text = (
        "model: {name: tiny:mistral}\ndata: {source: builtin:instructions}\ncluster:\n  launcher: slurm\n  nodes: 2\n  "
        "env:\n"
        "    NCCL_TIMEOUT: 600\n    HF_HOME: /tmp/hf\n  setup:\n    - module load cuda\n    - export "
        "NCCL_NET_DISABLE=1\n"
    )
    report = lint_text(tmp_path, text, "spec.yaml")
    assert found(report) == [("unknown-variable", 7), ("cache-not-shared", 8), ("unknown-variable", 11)]


def test_lint_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(SCRIPT)
    code = (
        "import sys\nfrom allranks.cli.main import cli\ncli.main(['lint', sys.argv[1]], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pandas', 'yaml', 'jinja2', 'psutil'} & set(sys.modules)\nassert "
        "not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_is_run_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/bash\ntouch {tmp_path}/made\nA=$(touch {tmp_path}/made)\neval 'touch {tmp_path}/made'\n")
    lint_verb(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.sh"]


def test_dos_line_breaks_hide_no_trap(tmp_path: Path) -> None:
    text = "#!/bin/bash\r\nexport NCCL_P2P_DISABLE=1\r\n"
    assert found(lint_text(tmp_path, text)) == [("transport-disabled", 2)]
    behind = lint_text(tmp_path, "#!/bin/bash\ncat > x <<EOF\n1\nEOF\nexport NCCL_TIMEOUT=1\n".replace("\n", "\r\n"))
    assert (found(behind), behind.unread) == ([("unknown-variable", 5)], [])


def test_severity_goes_by_the_case(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --cpus-per-task=8\n"
    loop = lint_text(tmp_path, head + "for f in a b; do\n  sbcast -f $f /tmp/$f\ndone\n")
    assert [(f.id, f.severity) for f in loop.findings if f.id == "sbcast"] == [("sbcast", "note")]
    (tmp_path / "job.sbatch").write_text(head + "#SBATCH --ntasks-per-node=8\nsrun -K1 python -u x.py\n")
    versions = {
        None: "note",
        "22.05": "warning",
        "slurm 23.02.6": "warning",
        "21.08": None,
        "23.11": None,
        "24.05.1": None,
    }
    for version, severity in versions.items():
        given = {f.id: f.severity for f in lint([tmp_path / "job.sbatch"], slurm_version=version).findings}
        assert given.get("cpus-not-inherited") == severity, version
    loaded = lint_text(
        tmp_path, head + "#SBATCH --ntasks-per-node=8\nmodule load slurm/23.02.7\nsrun -K1 python -u x.py\n"
    )
    assert ("cpus-not-inherited", "warning") in [(f.id, f.severity) for f in loaded.findings]


def test_what_one_file_says_in_two_ways_is_found_once(tmp_path: Path) -> None:
    twice = "#!/bin/bash\ncat > /tmp/ds.json <<'X'\n{}\nX\ndeepspeed train.py --config /tmp/ds.json\n"
    assert [i for i, _ in found(lint_text(tmp_path, twice))].count("fixed-name-in-tmp") == 1
    (tmp_path / "a.sh").write_text(SCRIPT)
    assert found(lint([tmp_path / "a.sh"] * 2)) == [("unknown-variable", 2)], "a file that is named twice"


def test_one_unreadable_file_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    done = lint_verb(tmp_path / "a.sh", tmp_path / "none.sh", "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert [f["id"] for f in document["findings"]] == ["unknown-variable"]
    assert document["unread"] == [{"file": str(tmp_path / "none.sh"), "line": None, "why": "no such file"}]
