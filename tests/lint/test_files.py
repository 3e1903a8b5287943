"""Files of every kind, also broken ones, what the command says to persons and programs, and what it repairs."""

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.analysis.lint import lint
from allranks.analysis.lint.output import apply_edits, github_commands, plan_repairs, write_repair
from allranks.analysis.lint.records import Edit
from allranks.cli.main import cli
from allranks.errors import RequestError
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


@pytest.mark.parametrize(("text", "line"), [
    ("export NCCL_TIMEOUT=1\nexport A='x\n", 3), ("ls\nif true; then\n", 3), ("srun bash <<E\nls\n", 2),
    ("for i in a b; do ls; done\n", 0), ("srun -A <account> ls > <file>\n", 0), ("{% if a %}\nfi\n{% endif %}\n", 0),
])  # fmt: skip
def test_a_syntax_error_is_reported_with_or_without_shellcheck(
    tmp_path: Path, text: str, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/bash\n{text}")
    assert any(f.id.startswith(("SC1", "shell-syntax")) for f in lint([path]).findings) == bool(line)
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, *args, **_: None if name == "shellcheck" else which(name, *args))
    assert [f.line for f in lint([path]).findings if f.id == "shell-syntax"] == ([line] if line else [])


SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(SHELLCHECK is None, reason="ShellCheck is not installed (extra lint)")
def test_findings_of_shellcheck_have_their_own_codes_and_can_be_ignored(tmp_path: Path) -> None:
    text = '#!/bin/bash\nrm -r "$D/"*\n# allranks: ignore[SC2115]\nrm -r "$D/"*\necho $A\ntorchrun ${ARGS[@]} t.py\n'
    report = lint_text(tmp_path, text, "a.sh")
    shown = [(f.id, f.line, f.severity) for f in report.findings if f.id.startswith("SC")]
    assert shown == [("SC2115", 2, "warning"), ("SC2068", 6, "note")], "style is not reported"
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
    document = json.loads(lint_verb(tmp_path / "job.sh", tmp_path / "nothing", "--json").stdout)
    assert [f["id"] for f in document["findings"]] == ["unknown-variable"]
    assert document["unread"] == [{"file": str(tmp_path / "nothing"), "line": None, "why": "no such file"}]


def test_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    done = lint_verb("-", tmp_path / "a.sh", "--json", stdin="PATH=/bin\nHOME=/root\nGLOO_SOCKET_IFNAME=^lo\n")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["files"] == ["standard input", str(tmp_path / "a.sh")]
    findings = [("standard input", "gloo-interface-syntax", 3), (str(tmp_path / "a.sh"), "unknown-variable", 2)]
    assert [(f["file"], f["id"], f["line"]) for f in document["findings"]] == findings
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


DUMP = "SHELL=/bin/sh\nNCCL_TIMEOUT=1\nPS1=a\n  b\nPATH=/bin\nHOME=/root\nMASTER_PORT=15123\nGLOO_SOCKET_IFNAME==eth0\n"
SPEC = """model: {name: tiny:mistral}
data: {source: builtin:instructions}
cluster:
  launcher: slurm
  nodes: 2
  env:
    NCCL_TIMEOUT: 600
    HF_HOME: /tmp/hf
  setup:
    - module load cuda
    - export NCCL_NET_DISABLE=1
"""
IN_DOS = "#!/bin/bash\ncat > x <<EOF\n1\nEOF\nexport NCCL_TIMEOUT=1\n".replace("\n", "\r\n")


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("now.env", DUMP, [("unknown-variable", 2), ("gloo-interface-syntax", 8)]),
    ("settings", "export A=1\nexport NCCL_TIMEOUT='5'  # s\n", [("unknown-variable", 2)]),
    ("x.env", 'A=1\nNCCL_IB_DISABLE=1 # x\nNCCL_SHM_DISABLE="1"\n', [("transport-disabled", n) for n in (2, 3)]),
    ("x.env", "A=1\r\nNCCL_TIMEOUT=1\r\n", [("unknown-variable", 2)]),
    ("x.env", "SLURM_JOB_NUM_NODES=2\nHF_HOME=/tmp/hf\n", [("cache-not-shared", 2)]),
    ("spec.yaml", SPEC, [("unknown-variable", 7), ("cache-not-shared", 8), ("unknown-variable", 11)]),
    ("job.sbatch", "#!/bin/bash\r\nexport NCCL_P2P_DISABLE=1\r\n", [("transport-disabled", 2)]),
    ("job.sbatch", IN_DOS, [("unknown-variable", 5)]),
])  # fmt: skip
def test_environment_files_specs_and_dos_line_breaks(tmp_path: Path, name: str, text: str, expected: list) -> None:
    report = lint_text(tmp_path, text, name)
    assert (found(report), report.unread) == (expected, [])


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


def test_severity_goes_by_the_case(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --cpus-per-task=8\n"
    loop = lint_text(tmp_path, head + "for f in a b; do\n  sbcast -f $f /tmp/$f\ndone\n")
    assert [(f.id, f.severity) for f in loop.findings if f.id == "sbcast"] == [("sbcast", "note")]
    (tmp_path / "job.sbatch").write_text(head + "#SBATCH --ntasks-per-node=8\nsrun -K1 python -u x.py\n")
    versions = {None: "note", "22.05": "warning", "slurm 23.02.6": "warning", "21.08": None, "23.11": None}
    for version, severity in versions.items():
        given = {f.id: f.severity for f in lint([tmp_path / "job.sbatch"], slurm_version=version).findings}
        assert given.get("cpus-not-inherited") == severity, version
    text = f"{head}#SBATCH --ntasks-per-node=8\nmodule load slurm/23.02.7\nsrun -K1 python -u x.py\n"
    assert ("cpus-not-inherited", "warning") in [(f.id, f.severity) for f in lint_text(tmp_path, text).findings]


def test_what_one_file_says_in_two_ways_is_found_once(tmp_path: Path) -> None:
    twice = "#!/bin/bash\ncat > /tmp/ds.json <<'X'\n{}\nX\ndeepspeed train.py --config /tmp/ds.json\n"
    assert [i for i, _ in found(lint_text(tmp_path, twice))].count("fixed-name-in-tmp") == 1
    (tmp_path / "a.sh").write_text(SCRIPT)
    assert found(lint([tmp_path / "a.sh"] * 2)) == [("unknown-variable", 2)], "a file that is named twice"


TO_REPAIR = """#!/bin/bash
#SBATCH --nodes=1
torchrun --standalone train.py | tee log
ls
"""
REPAIRED = TO_REPAIR.replace("torchrun", "set -o pipefail\ntorchrun")


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["lint", *map(str, words)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_repairs_are_shown_first_and_written_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(TO_REPAIR)
    path.chmod(0o750)
    code, shown = run(path, "--fix")
    assert code == 1 and path.read_text() == TO_REPAIR, "nobody has confirmed"
    assert "+set -o pipefail" in shown and "nothing was written" in shown
    code, shown = run(path, "--fix", "--yes")
    assert (code, path.read_text()) == (0, REPAIRED)
    assert "+set -o pipefail" in shown and "repaired 1 place in 1 file" in shown
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert run(path, "--fix", "--yes")[1].strip() == "nothing to repair: no finding has a safe repair"
    assert [p.name for p in tmp_path.iterdir()] == ["job.sbatch"]


def test_a_repaired_file_keeps_line_ends_links_and_bytes(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "job.sbatch").write_bytes(TO_REPAIR.replace("ls", "echo é").replace("\n", "\r\n").encode())
    link = tmp_path / "job.sbatch"
    link.symlink_to(real / "job.sbatch")
    assert run(link, "--fix", "--yes")[0] == 0
    assert link.is_symlink()
    assert (real / "job.sbatch").read_bytes() == REPAIRED.replace("ls", "echo é").replace("\n", "\r\n").encode()


def test_no_pipefail_where_it_could_end_the_script(tmp_path: Path) -> None:
    for head in ("#!/bin/sh\n", "#!/bin/bash -e\n"):
        report = lint_text(tmp_path, head + "#SBATCH -N 1\ntorchrun --standalone x.py | tee log\n")
        assert [(f.id, f.fix) for f in report.findings if f.id == "exit-code-lost"] == [("exit-code-lost", ())], head


def test_what_is_not_repaired(tmp_path: Path) -> None:
    latin = tmp_path / "latin.sh"
    latin.write_bytes(TO_REPAIR.encode() + b"# caf\xe9\n")
    assert lint([latin]).findings and not plan_repairs(lint([latin]))
    path = tmp_path / "a.sh"
    path.write_text(TO_REPAIR)
    (repair,) = plan_repairs(lint([path]))
    path.write_text(TO_REPAIR + "\n# changed\n")
    with pytest.raises(RequestError, match="has changed"):
        write_repair(repair)
    done = CliRunner().invoke(cli, ["lint", "--fix", "--yes", "-"], input=TO_REPAIR, standalone_mode=False)
    assert "nothing to repair" in done.output


def test_a_diff_shows_no_secrets(tmp_path: Path) -> None:
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx"
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/bash\n#SBATCH -N 1\nexport HF_TOKEN={token}\ntorchrun --standalone t.py | tee log\n")
    code, shown = run(path, "--fix", "--yes")
    assert code == 0 and token not in shown and "HF_TOKEN=***" in shown
    assert token in path.read_text() and "pipefail" in path.read_text()


def test_edits_that_overlap_or_repeat() -> None:
    edits = [Edit(4, 5, "X"), Edit(0, 2, "ab"), Edit(1, 3, "no"), Edit(0, 2, "ab"), Edit(6, 6, "!")]
    assert apply_edits("012345", edits) == "ab23X5!"


def test_github_commands_cannot_be_forged(tmp_path: Path) -> None:
    path = tmp_path / "a,b:c%.sh"
    path.write_text("#!/bin/bash\nexport NCCL_P2P_LEVEL=a%0A::error::x\nexport NCCL_TIMEOUT=1\n")
    lines = list(github_commands(lint([path, tmp_path / "none.sh"])))
    assert lines[0].startswith("::error file=")
    assert "a%2Cb%3Ac%25.sh,line=2,col=8,title=allranks lint%3A invalid-value::" in lines[0]
    assert "NCCL_P2P_LEVEL=a%250A::error::x" in lines[0], "the message is escaped, and is the end of the command"
    assert "line=3" in lines[1] and lines[2].startswith("::error file=") and "no such file" in lines[2]
    assert not lines[-1].startswith("::") and all("\n" not in line for line in lines)


def test_the_version_of_slurm_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("ls\n")
    for bad in ("new", "23", "2023.11", "23.x"):
        with pytest.raises(RequestError, match=r"such as 23\.11"):
            words = ["lint", str(tmp_path / "a.sh"), "--slurm-version", bad]
            CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)
