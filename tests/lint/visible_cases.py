"""Cases about CUDA_VISIBLE_DEVICES and ports in options: the rule, the script, the line and the severity; line 0 for none."""

from __future__ import annotations

from tests.lint.cases import ONE, TWO
from tests.lint.count_cases import EIGHT

START = "#!/bin/bash\n"
SEEN = "CUDA_VISIBLE_DEVICES="
ADDRESS = "export MASTER_ADDR=$HEAD\n"
MANY = ONE.replace("--ntasks-per-node=1", "--ntasks-per-node=4")
LOOP = "for i in {}; do\n  " + SEEN + "$i python x.py --seed $i &\ndone\nwait\n"
SIDE = (
    SEEN
    + "0,1 torchrun --nproc_per_node=2 --master_port 12001 a.py &\n"
    + SEEN
    + "{} torchrun --nproc_per_node=2 --master_port 12002 b.py &\nwait\n"
)

VISIBLE_CASES: list[tuple[str, str, int, str]] = [
    ("device-of-one-gpu", START + SEEN + "3 python x.py --device cuda:3\n", 2, "error"),
    ("device-of-one-gpu", START + "export " + SEEN + "0,1\npython x.py --device=cuda:2\n", 3, "error"),
    ("device-of-one-gpu", START + SEEN + "3 python x.py --device cuda:0\n", 0, ""),
    ("device-of-one-gpu", START + SEEN + "2 python x.py --gpu 2\n", 0, ""),  # the program may set the variable itself
    ("device-of-one-gpu", START + SEEN + "2 python a.py\npython x.py --device cuda:2\n", 0, ""),
    ("visible-devices", EIGHT + "srun bash -c 'export " + SEEN + "$SLURM_PROCID; python x.py'\n", 7, "error"),
    ("visible-devices", MANY + ADDRESS + "srun bash -c '" + SEEN + "0 python x.py'\n", 8, "warning"),
    ("visible-devices", EIGHT + "srun bash -c 'export " + SEEN + "$SLURM_LOCALID; python x.py'\n", 0, ""),
    ("visible-devices", MANY + "srun bash -c 'export " + SEEN + "$SLURM_PROCID; python x.py'\n", 0, ""),
    ("visible-devices", ONE + LOOP.format("1 2 3 4"), 8, "warning"),
    ("visible-devices", ONE + LOOP.format("{1..4}"), 8, "warning"),
    ("visible-devices", ONE + LOOP.format("{0..3}"), 0, ""),
    ("visible-devices", ONE + LOOP.format("1 2 3 4").replace("$i p", "$((i-1)) p"), 0, ""),
    ("same-gpu", ONE + SIDE.format("1,2"), 8, "warning"),
    ("same-gpu", ONE + SIDE.format("2,3"), 0, ""),
    ("same-gpu", ONE + SIDE.format("1,2").replace("&\n", "\n", 1), 0, ""),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_processes 8 x.py\n", 2, "error"),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_processes 2 x.py\n", 0, ""),
    ("more-ranks-than-gpus", START + SEEN + "4,5 accelerate launch --num_machines 2 --num_processes 4 x.py\n", 0, ""),
    ("invalid-value", TWO + "srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$H:99999 x.py\n", 7, "error"),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --master-port 80 x.py\n", 2, "warning"),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --master_port=12080 x.py\n", 0, ""),
    ("invalid-value", START + "torchrun --nproc_per_node=4 --rdzv_endpoint=localhost:0 x.py\n", 0, ""),
]  # fmt: skip
