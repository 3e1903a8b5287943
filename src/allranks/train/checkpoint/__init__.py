"""Checkpoints: every rank writes what it holds, a fresh process reads it again, one rename publishes it.

checkpoints/step-N/
    manifest.json                 step, mode, world size, and the hash of every file
    adapter_model.safetensors, adapter_config.json     or a Hugging Face model folder; and the tokenizer
    state/                        mode full: shard-*.safetensors (each rank's parts of the optimizer's state, and weights that the
                                  files above do not hold bit by bit), rank<R>.pt (random generators), progress.json, spec.yaml
checkpoints/latest                the newest one's name

No rank gathers anything: a part that its rank alone holds goes through the disk to the file in which it is published.
"""

from allranks.train.checkpoint.loading import load_full, load_lite
from allranks.train.checkpoint.published import Published, published_of
from allranks.train.checkpoint.saver import Saver

__all__ = ["Published", "Saver", "load_full", "load_lite", "published_of"]
