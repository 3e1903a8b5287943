"""What a strategy keeps in the host's memory instead: the optimizer's state, or the weights of its part too."""

from __future__ import annotations

from allranks.fit.sharing import Model, Parts, Sharing, _share


class Offloaded:
    """A way of sharing, less what is on the host. On CPUs all is on the host, and the optimizer's copy of the weights is more."""

    def __init__(self, inner: Sharing, offload: str, model: Model) -> None:
        self._inner, self._offload, self._m = inner, offload, model
        self.setup, self.in_loss, self.at_head = inner.setup, inner.in_loss, inner.at_head
        self.in_backward, self.at_end, self.at_update = inner.in_backward, inner.at_end, inner.at_update

    def kept(self) -> Parts:
        """Weights, and the optimizer's state, as far as they are on the device."""
        parts = self._inner.kept()
        if self._m.device == "cpu":
            copied = _share(self._m.gradients, self._m.world) if self._offload == "optimizer" else 0
            return parts | {"optimizer_state": parts["optimizer_state"] + copied}
        gone = ("optimizer_state",) if self._offload == "optimizer" else ("optimizer_state", "weights", "adapters")
        return {key: n for key, n in parts.items() if key not in gone}
