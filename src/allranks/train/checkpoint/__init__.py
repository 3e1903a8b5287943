"""Write checkpoints: each rank writes its part and compares it with memory, and one rename publishes all of them.

checkpoints/step-N/
    manifest.json                 step, mode, world size, and the hash of every file
    adapter_model.safetensors, adapter_config.json     or a Hugging Face model folder; and the tokenizer
    state/                        mode full: shard-*.safetensors (each rank's part of the optimizer
                                  state, and weights that the files above do not hold bitwise),
                                  rank<R>.pt (random generators), progress.json, spec.yaml
checkpoints/latest                name of the newest checkpoint

Weights are not gathered in memory: shards are combined into the published file through the disk.
"""

from allranks.train.checkpoint.loader import load_full, load_weights_only
from allranks.train.checkpoint.saver import Saver
from allranks.train.checkpoint.writer import PublishedFiles, TrainingIdentity, plan_published_files

__all__ = ["PublishedFiles", "Saver", "TrainingIdentity", "load_full", "load_weights_only", "plan_published_files"]
