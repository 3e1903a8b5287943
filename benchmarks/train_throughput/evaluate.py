"""Held-out loss of a saved adapter, or of the bare base, by the function the peers use. Prints one JSON document.

Run as: ``python -m benchmarks.train_throughput.evaluate --workload W [--adapter FOLDER] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.train_throughput.measure import heldout_loss
from benchmarks.train_throughput.workload import Workload


def evaluate(workload: Workload, adapter: Path | None) -> float:
    """Load the workload's base, put the adapter on it, and evaluate."""
    model = AutoModelForCausalLM.from_pretrained(workload.model_path, dtype=torch.float32, attn_implementation="sdpa")
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    return heldout_loss(model, workload.heldout)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="PEFT folder; without it the base is evaluated")
    parser.add_argument("--out", type=Path, help="also write the document here")
    args = parser.parse_args()
    text = json.dumps({"heldout_loss": evaluate(Workload(args.workload), args.adapter)})
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
