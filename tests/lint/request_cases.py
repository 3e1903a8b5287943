"""Cases about requests that are refused, and what containers and jsrun's processes get: rule, script, line, severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import TWO
from tests.lint.count_cases import EIGHT, LSF, asks

RUN = "srun python x.py\n"
ADDRESS = "export MASTER_ADDR=10.0.0.1\n"

REQUESTS: list[tuple[str, str, int, str]] = [
    ("directive-refused", asks("-N 2", "--gpus-per-node=4", "--gpus=4") + RUN, 4, "error"),
    ("directive-refused", asks("-N 1", "--gres=gpu:a100:4", "-G 2") + RUN, 4, "error"),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=4") + RUN, 4, "error"),
    ("directive-refused", asks("-N 1", "--ntasks-per-gpu=1", "--ntasks-per-node=4") + RUN, 4, "error"),
    ("directive-refused", asks("-N 1", "-c 8", "--cpus-per-gpu=8") + RUN, 4, "warning"),
    ("directive-refused", asks("-l select=1:ncpus=8:walltime=10:00:00", system="PBS") + "python x.py\n", 2, "error"),
    ("directive-refused", asks("-N 2", "--gpus-per-node=4", "--gpus=8") + RUN, 0, ""),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=2") + RUN, 0, ""),
    ("directive-refused", asks("-N 1", "--gres=gpu:2", "--gpus-per-node=4") + "python x.py\n", 0, ""),  # no step
    ("directive-refused", asks("-N 1", "--cpus-per-gpu=8", "--ntasks-per-gpu=1") + RUN, 0, ""),
    ("directive-refused", asks("-l select=1:ncpus=8 -l walltime=10:00:00", system="PBS") + "python x.py\n", 0, ""),
    ("directive-not-read", asks("-l select=1:ncpus=8, walltime=1:00:00", system="PBS") + "python x.py\n", 2, "warning"),
    ("directive-not-read", asks("-l select=1:ncpus=8 -l walltime=1:00:00", system="PBS") + "python x.py\n", 0, ""),
]
CONTAINERS: list[tuple[str, str, int, str]] = [
    ("not-exported", "#!/bin/bash\n" + ADDRESS + "docker run --gpus all img python x.py\n", 2, "warning"),
    ("not-exported", "#!/bin/bash\nCUDA_VISIBLE_DEVICES=1 docker run --gpus all --rm img python x.py\n", 2, "warning"),
    ("not-exported", EIGHT + ADDRESS + "srun singularity exec --nv --cleanenv x.sif python x.py\n", 7, "warning"),
    ("not-exported", EIGHT + "export NCCL_DEBUG=INFO\nsrun apptainer exec -e --nv x.sif python x.py\n", 7, "warning"),
    ("not-exported", "#!/bin/bash\n" + ADDRESS + "docker run -e MASTER_ADDR --gpus all img python x.py\n", 0, ""),
    ("not-exported", "#!/bin/bash\n" + ADDRESS + "docker run --env-file e --gpus all img python x.py\n", 0, ""),
    ("not-exported", "#!/bin/bash\n" + ADDRESS + "docker run img torchrun --master_addr=$MASTER_ADDR x.py\n", 0, ""),
    ("not-exported", EIGHT + ADDRESS + "srun singularity exec --nv x.sif python x.py -e 1\n", 0, ""),
    ("not-exported", EIGHT + ADDRESS + "export APPTAINERENV_MASTER_ADDR=1\nsrun apptainer exec -e x.sif python x.py\n", 0, ""),
    ("not-exported", EIGHT + ADDRESS + "srun apptainer exec -e --env MASTER_ADDR=1 x.sif python x.py\n", 0, ""),
    ("world-size", LSF + "jsrun -n 4 -r 1 -a 6 -g 6 python x.py --world-size 4\n", 3, "error"),
    ("world-size", LSF + "jsrun -n 4 -r 1 -a 6 -g 6 python x.py --world-size 24\n", 0, ""),
    ("several-torchruns", "#!/bin/bash\n#COBALT -n 2\naprun -n 8 -N 4 torchrun --nproc_per_node=4 x.py\n", 3, "error"),
    ("several-torchruns", "#!/bin/bash\n#COBALT -n 2\naprun -n 2 -N 1 torchrun --nproc_per_node=4 x.py\n", 0, ""),
    ("same-gpu", TWO + "srun -N1 python train.py --seed 1 &\nsrun -N1 python train.py --seed 2 &\nwait\n", 0, ""),
]  # fmt: skip
REQUEST_CASES = [*REQUESTS, *CONTAINERS]
