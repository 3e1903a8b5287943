"""Time from the command to the end of the first optimizer step, beside HF Trainer, with cold and with warm data caches.

``python -m benchmarks.first_step --alpaca FILE [--pairs 5] [--json OUT]``. Both train LoRA adapters of the same small Mistral on the same
rows with the same tokens, on two ranks with one thread each: ``allranks run`` from a spec, and ``torchrun`` with a Trainer program as its
documentation shows it (`datasets` loads and tokenizes the rows, rank 0 first). *Cold* is an empty cache folder for both, *warm* the run
after it. All files are in the page cache. The two take turns, and which begins changes from pair to pair.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks import machine, programs
from benchmarks.train_throughput.ours import spec
from benchmarks.train_throughput.workload import ENV, LEARNING_RATE, LORA, SEQ_LEN, WORLD, Workload, build

TIMEOUT_S = 300.0
LIMIT = 0.7
PROGRAM = f"""\
import sys, time
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments)

model_path, rows, out = sys.argv[1:4]
args = TrainingArguments(
    output_dir=out + ".trainer", max_steps=2, per_device_train_batch_size=1, learning_rate={LEARNING_RATE}, report_to="none",
    use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False, save_strategy="no", disable_tqdm=True)
tokenizer = AutoTokenizer.from_pretrained(model_path)


def tokenize(row):
    middle = f"### Input:\\n{{row['input']}}\\n\\n" if row["input"].strip() else ""
    text = f"### Instruction:\\n{{row['instruction']}}\\n\\n{{middle}}### Response:\\n{{row['output']}}{{tokenizer.eos_token}}"
    return tokenizer(text, truncation=True, max_length={SEQ_LEN})


with args.main_process_first():
    data = load_dataset("json", data_files=rows, split="train")
    data = data.map(tokenize, remove_columns=data.column_names)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), LoraConfig(task_type="CAUSAL_LM", **{LORA!r}))


class FirstStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == 0:
            open(out, "w").write(str(time.time()))


Trainer(
    model=model, args=args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[FirstStep()]).train()
"""


def ours(workload: Workload, folder: Path, cache: Path) -> float:
    """Seconds from the command to the end of rank 0's first step."""
    root = folder / "runs"
    made = spec(workload, "wrapped", 1, 1, root)  # a step is recorded while the next one runs, or at the end
    made["cluster"]["cache"] = str(cache)
    made["eval"] = {"source": None, "at_end": False, "samples": 0}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(made))
    began = time.time()
    programs.run([programs.console_script(), "run", str(path)], folder / "ours.log", TIMEOUT_S, ENV)
    (run,) = root.iterdir()
    events = map(json.loads, (run / "events" / "rank0.jsonl").read_text().splitlines())
    first = next(e["time"] for e in events if e["event"] == "step")
    shutil.rmtree(root)
    return first - began


def theirs(workload: Workload, folder: Path, cache: Path) -> float:
    """Seconds from torchrun's command to the end of rank 0's first step."""
    program, out = folder / "program.py", folder / "first"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", str(program)]
    command += [str(workload.model_path), str(workload.folder / "train.json"), str(out)]
    began = time.time()
    programs.run(command, folder / "theirs.log", TIMEOUT_S, {**ENV, "HF_DATASETS_CACHE": str(cache)})
    return float(out.read_text()) - began


def pair_of(workload: Workload, number: int) -> dict[str, dict[str, float]]:
    """One cold and one warm run of each."""
    found: dict[str, dict[str, float]] = {"cold": {}, "warm": {}}
    sides = {"allranks": ours, "hf_trainer": theirs}
    with TemporaryDirectory() as name:
        for times in found.values():
            for side in list(sides)[:: 1 if number % 2 else -1]:
                cache = Path(name) / side
                times[side] = round(sides[side](workload, Path(name), cache), 3)
    return found


def summary(pairs: list[dict[str, dict[str, float]]], state: str) -> dict[str, Any]:
    """Median and range of both times and of their ratio."""

    def spread(values: list[float]) -> dict[str, float]:
        return {n: round(f(values), 3) for n, f in (("median", statistics.median), ("min", min), ("max", max))}

    times = {side: spread([p[state][side] for p in pairs]) for side in pairs[0][state]}
    return {**times, "ratio": spread([p[state]["allranks"] / p[state]["hf_trainer"] for p in pairs])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpaca", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the rows, made once")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    programs.exit_on_sigterm()
    workload = build(args.alpaca, args.work)
    pair_of(workload, 0)  # the page cache
    clock, pairs = machine.CpuClock.now(), []
    for number in range(args.pairs):
        pairs.append(pair_of(workload, number))
        print(json.dumps(pairs[-1]), flush=True)
    result = {
        "benchmark": "first_step",
        "ranks": WORLD,
        "rows": len(workload.train),
        "cold": summary(pairs, "cold"),
        "warm": summary(pairs, "warm"),
        "pairs": pairs,
        "disturbed": clock.disturbance(),
        "machine": machine.facts(),
    }
    print(json.dumps({k: result[k] for k in ("cold", "warm", "disturbed")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(max(result[state]["ratio"]["median"] for state in ("cold", "warm")) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
