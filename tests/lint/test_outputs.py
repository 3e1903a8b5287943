"""What lint writes for other programs, and what it writes into the files themselves."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from allranks.analysis.lint import lint
from allranks.analysis.lint.output import apply_edits, github_commands, plan_repairs, write_repair
from allranks.analysis.lint.records import Edit
from allranks.cli.main import cli
from allranks.errors import RequestError
from tests.lint.helpers import lint_text

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1
torchrun --standalone train.py | tee log
ls
"""
REPAIRED = SCRIPT.replace("torchrun", "set -o pipefail\ntorchrun")


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["lint", *map(str, words)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_repairs_are_shown_first_and_written_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(SCRIPT)
    path.chmod(0o750)
    code, shown = run(path, "--fix")
    assert code == 1 and path.read_text() == SCRIPT, "nobody has confirmed"
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
    (real / "job.sbatch").write_bytes(SCRIPT.replace("ls", "echo é").replace("\n", "\r\n").encode())
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
    latin.write_bytes(SCRIPT.encode() + b"# caf\xe9\n")
    assert lint([latin]).findings and not plan_repairs(lint([latin]))
    path = tmp_path / "a.sh"
    path.write_text(SCRIPT)
    report = lint([path])
    (repair,) = plan_repairs(report)
    path.write_text(SCRIPT + "\n# changed\n")
    with pytest.raises(RequestError, match="has changed"):
        write_repair(repair)
    done = CliRunner().invoke(cli, ["lint", "--fix", "--yes", "-"], input=SCRIPT, standalone_mode=False)
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
    assert (
        lines[0].startswith("::error file=")
        and "a%2Cb%3Ac%25.sh,line=2,col=8,title=allranks lint%3A invalid-value::" in lines[0]
    )
    assert "NCCL_P2P_LEVEL=a%250A::error::x" in lines[0], "the message is escaped, and is the end of the command"
    assert "line=3" in lines[1] and lines[2].startswith("::error file=") and "no such file" in lines[2]
    assert not lines[-1].startswith("::") and all("\n" not in line for line in lines)


def test_the_version_of_slurm_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("ls\n")
    for bad in ("new", "23", "2023.11", "23.x"):
        with pytest.raises(RequestError, match=r"such as 23\.11"):
            CliRunner().invoke(
                cli,
                ["lint", str(tmp_path / "a.sh"), "--slurm-version", bad],
                standalone_mode=False,
                catch_exceptions=False,
            )
