"""What a rank holds while it trains: a walk through one optimizer step, block by block."""

from __future__ import annotations

from itertools import accumulate

from allranks.fit.activations import Batch, Layer, kept_behind, logits
from allranks.fit.records import Moment
from allranks.fit.sharing import Model, Parts, Sharing, _add

SETUP, LOSS, BACKWARD, END, UPDATE = "set-up", "loss", "backward", "end of backward", "optimizer step"


class Step:
    """The moments of one strategy, model and micro-batch."""

    def __init__(self, model: Model, sharing: Sharing, batch: Batch, *, checkpointing: bool) -> None:
        self._m, self._s, self._b = model, sharing, batch
        shapes = model.shapes
        distinct = {id(block): block for block in shapes.blocks}  # equal blocks are one object
        layers = {key: Layer(shapes.config, block, model.what, batch) for key, block in distinct.items()}
        whole = {key: layer.kept() for key, layer in layers.items()}
        passing = {key: layer.passing() for key, layer in layers.items()}
        output = batch.tokens * shapes.config.hidden * batch.element
        self._whole = [whole[id(block)] for block in shapes.blocks]
        self._passing = [passing[id(block)] for block in shapes.blocks]
        self._kept = [output if checkpointing else n for n in self._whole]
        self._kept_up_to = list(accumulate(self._kept))
        self._checkpointing = checkpointing
        self._behind = kept_behind(shapes, model.what, batch)
        self._logits = logits(shapes, batch)
        self._hidden = output

    def moments(self) -> list[Moment]:
        """In the order in which they come. ``backward`` is its worst block."""
        blocks = [self._in_block(at) for at in reversed(range(len(self._kept)))]
        return [
            Moment(name=SETUP, parts=_clean(self._s.setup())),
            self._moment(LOSS, self._s.in_loss(), sum(self._kept) + self._behind, self._logits),
            max((self._head(), *blocks), key=lambda m: m.total_bytes),
            self._moment(END, self._s.at_end(), 2 * self._hidden, 0),
            self._moment(UPDATE, self._s.at_update(), 0, 0),
        ]

    def _head(self) -> Moment:
        """The vocabulary's projection has been differentiated; nothing else has."""
        return self._moment(BACKWARD, self._s.at_head(), sum(self._kept) + self._behind + self._hidden, 0)

    def _in_block(self, at: int) -> Moment:
        recomputed = self._whole[at] if self._checkpointing else 0
        kept = self._kept_up_to[at] + recomputed + self._passing[at]
        return self._moment(BACKWARD, self._s.in_backward(at), kept, 0)

    def _moment(self, name: str, parts: Parts, activations: int, scores: int) -> Moment:
        own = _add(self._s.kept(), parts)
        return Moment(name=name, parts=_clean(_add(own, {"activations": activations, "logits": scores})))


def _clean(parts: Parts) -> Parts:
    return {key: n for key, n in parts.items() if n}
