"""Rules that read the files beside a script, in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.lint import lint

JOB = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:1\n"
SETTINGS = "TRAIN_FILE=train.py\nDATA=/a/b\nOPTIONAL=${OPTIONAL:-1}\n"


def findings(folder: Path, script: str, rule: str, *, notes: bool = False) -> list[int]:
    """The lines of a script in the folder jobs of a repository that have a finding of the rule, or only a note."""
    (folder / ".git").mkdir()
    (folder / "jobs").mkdir()
    (folder / "config.env").write_text(SETTINGS)
    (folder / "jobs/inner.sh").write_text('#!/bin/bash\npython t.py --lr $LR --seed "${SEED:-1}"\n')
    (folder / "src").mkdir()
    (folder / "src/train.py").write_text("")
    (folder / "src/src").mkdir()
    (folder / "src/src/deep.py").write_text("")
    path = folder / "jobs/job.sh"
    path.write_text(JOB + script)
    return [f.line for f in lint([path]).findings if f.id == rule and (f.severity == "note") == notes]


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("P=${TRAIN_FILE}\nsource config.env\npython $P\n", [4]),
        ('P=$TRAIN_FILE\nsource "$(dirname "$0")/config.env"\npython $P\n', [4]),
        ("source config.env\nP=${TRAIN_FILE}\npython $P\n", []),
        ("P=${TRAIN_FILE:-x.py}\nsource config.env\npython $P\n", []),
        ("P=$OPTIONAL\nsource config.env\npython $P\n", []),
        ("P=${TRAIN_FILE}\nsource other.env\nsource config.env\npython $P\n", []),
    ],
)
def test_a_variable_above_the_file_that_sets_it(tmp_path: Path, script: str, lines: list[int]) -> None:
    assert findings(tmp_path, script, "unset-variable") == lines


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("LR=1\nbash inner.sh\n", [4]),
        ("LR=1\nsrun inner.sh\n", [4]),
        ("LR=1\n./inner.sh $LR\n", [4]),
        ("export LR=1\nbash inner.sh\n", []),
        ("LR=1\nsource inner.sh\n", []),
        ("LR=1 bash inner.sh\n", []),
        ("SEED=1\nbash inner.sh\n", []),
        ("LR=1\nsbatch --export=ALL,LR=$LR inner.sh\n", []),
    ],
)
def test_a_variable_that_a_started_script_reads(tmp_path: Path, script: str, lines: list[int]) -> None:
    assert findings(tmp_path, script, "not-exported") == lines


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("cd src\npython src/train.py\n", [5]),
        ("cd src\nsrun python src/train.py\n", [5]),
        ("cd src\npython train.py\n", []),
        ("cd src\npython src/deep.py\n", []),
        ("python src/train.py\n", []),
        ("cd /other/src\npython src/train.py\n", []),
        ("cd src\ncd ..\npython src/train.py\n", []),
        ("(cd src && ls)\npython src/train.py\n", []),
    ],
)
def test_a_program_in_the_folder_that_the_script_has_left(tmp_path: Path, script: str, lines: list[int]) -> None:
    assert findings(tmp_path, script, "out-of-place") == lines


FOUR = "MODEL=a\nLR=1\nBS=2\nSEED=3\n"
COMMAND = "python t.py --m $MODEL --lr $LR --b $BS --s $SEED --task $TASK\n"


@pytest.mark.parametrize(
    ("script", "other", "lines"),
    [
        (FOUR + COMMAND, "", [8]),
        (FOUR + COMMAND, "for TASK in a b; do export TASK; sbatch jobs/job.sh; done\n", []),
        (FOUR + "TASK=x\n" + COMMAND, "", []),
        (FOUR + COMMAND.replace("$TASK", "${TASK:-x}"), "", []),
        (FOUR + COMMAND.replace("$TASK", "$DATA_DIR"), "", []),
        ("MODEL=a\n" + COMMAND.replace("$LR", "1").replace("$BS", "2").replace("$SEED", "3"), "", []),
    ],
)
def test_a_variable_that_no_file_of_the_repository_sets(
    tmp_path: Path, script: str, other: str, lines: list[int]
) -> None:
    (tmp_path / "README.md").write_text(other)
    assert findings(tmp_path, script, "unset-variable", notes=True) == lines


@pytest.mark.parametrize(
    ("version", "severities"),
    [(None, ["note", "warning"]), ("22.05", ["warning", "warning"]), ("23.02", []), ("24.11.5", [])],
)
def test_slurm_creates_folders_of_logs_since_23_02(version: str | None, severities: list[str], tmp_path: Path) -> None:
    """A folder that is only missing here, and one that the job creates too late."""
    head = "#!/bin/bash\n#SBATCH --time=1:00:00\n#SBATCH --output=logs/%j.out\n"
    found = []
    for name, more in (("a", ""), ("b", "mkdir -p logs\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.sbatch").write_text(f"{head}{more}python -u train.py\n")
        report = lint([tmp_path / name / "job.sbatch"], slurm_version=version)
        found += [f.severity for f in report.findings if f.id == "output-folder"]
    assert found == severities


@pytest.mark.parametrize(
    ("heading", "work", "lines"),
    [
        ("#PBS -o logs/\n", "", [2]),
        ("#PBS -o src/\n", "", []),
        ("#PBS -o logs/\n", "mkdir -p logs\n", []),
        ("#PBS -o /a/logs/\n", "", []),
        ("#BSUB -o logs/%J.out\n", "", [2]),
        ("#$ -o logs/a.out\n", "", [2]),
        ("#$ -o logs/\n", "mkdir -p logs\n", [2]),
        ("#PBS -o logs/  # mkdir logs first\n", "", []),
    ],
)
def test_folders_for_the_logs_of_other_systems(tmp_path: Path, heading: str, work: str, lines: list[int]) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    path = tmp_path / "job.sh"
    path.write_text(f"#!/bin/bash\n{heading}{work}python src/train.py\n")
    found = [f for f in lint([path]).findings if f.id == "output-folder"]
    assert [f.line for f in found] == lines and all(f.severity == "warning" for f in found)
    (tmp_path / ".git").rmdir()
    assert not [f for f in lint([path]).findings if f.id == "output-folder"]
