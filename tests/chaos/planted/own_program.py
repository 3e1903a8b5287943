"""A user's program that all-reduces. ``own_program.py STEPS WHERE HOW RANK STEP``: that rank does HOW at WHERE."""

import os
import sys
import time

from chaos_acts import act, mark

STEPS, WHERE, HOW, RANK, STEP = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])


def fault(where):
    if where == WHERE and int(os.environ["RANK"]) == RANK:
        act(HOW, where)


fault("import")
import torch
import torch.distributed as dist

fault("init")
dist.init_process_group("gloo")
for step in range(STEPS):
    if step == STEP:
        fault("training")
    dist.all_reduce(torch.ones(1))
    if step == 3:
        mark("steps")
    time.sleep(0.05)
dist.destroy_process_group()
fault("ending")
print("all steps done", flush=True)
