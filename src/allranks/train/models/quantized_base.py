"""Hold a LoRA model's frozen linear layers in 4 bits (`nf4`), and quantise them as the weights are loaded.

It concerns the linear layers of the transformer blocks. Embeddings, the output projection, norms, adapters and modules
that are trained in full stay as they are. Rank 0 reads a weight in float32, quantises it on its device and sends the
result. It also proves each weight: what the ranks will compute with is nowhere farther from the file than half of the
widest gap between two values of NF4, times the block's scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from allranks.errors import ProofFailed, SpecError
from allranks.spec.records import NF4_BLOCK, NF4_DOUBLE, QUANTIZE_NONE, nf4_row_bytes
from allranks.train.models.block_forward import transformer_blocks
from allranks.train.models.moe import routers_of
from allranks.train.models.nf4 import REACH, NF4Linear, dequantize, quantize
from allranks.train.models.weight_loader import WeightLoader, origin_of, unmaterialized_parameter
from allranks.train.models.weight_sources import FileSource, ModelSource
from allranks.utils.text import format_bytes

_NOT_OF_THE_BASE = (".lora_", ".modules_to_save", ".original_module")
_WEIGHT, _SCALES = ":weight", ":scales"  # suffixes of the origins of what is stored of a weight


def layers_to_quantize(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, attribute, layer) of the frozen linear layers of the blocks, if their rows are whole blocks."""
    inside = {module for block in transformer_blocks(model) for module in block.modules()}
    for path, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            own = not any(part in f"{path}.{name}" for part in _NOT_OF_THE_BASE)
            if own and type(layer) is nn.Linear and layer in inside and layer.in_features % NF4_BLOCK == 0:
                yield parent, name, layer


def quantize_base(model: nn.Module, loader: WeightLoader, mode: str, device: torch.device) -> list[str]:
    """Replace the layers by ones without weights yet, which `loader` will fill, and return remarks.

    Raises:
        SpecError: the model has no such layers, or experts.
    """
    if mode == QUANTIZE_NONE:
        return []
    if routers_of(model):
        raise SpecError(
            f"model.quantize {mode}: the experts of {type(model).__name__} are no linear layers; set it to none"
        )
    before = after = count = 0
    for parent, name, layer in layers_to_quantize(model):
        origin = origin_of(layer.weight)
        assert origin is not None
        weight, scales = (
            unmaterialized_parameter(
                torch.Size((layer.out_features, columns)), torch.uint8, device, origin + suffix, trained=False
            )
            for columns, suffix in zip(nf4_row_bytes(layer.in_features, mode), (_WEIGHT, _SCALES), strict=True)
        )
        setattr(parent, name, NF4Linear(layer, weight, scales))
        before += layer.weight.numel() * layer.weight.element_size()
        after += weight.numel() + scales.numel()
        count += 1
    if not count:
        raise SpecError(
            f"model.quantize {mode}: the blocks of {type(model).__name__} have no linear layers (torch.nn.Linear) with "
            f"a multiple of {NF4_BLOCK} inputs; set it to none"
        )
    loader.wrap_source(lambda source: QuantizedSource(source, mode, device))
    sizes = f"{format_bytes(after)} instead of {format_bytes(before)}"
    return [f"model.quantize {mode}: {count} linear layers of the blocks take {sizes}"]


def quantize_loaded(model: nn.Module, mode: str, dtype: torch.dtype | None = None) -> None:
    """Quantise the layers of a model that has its weights, and cast the rest of the base to `dtype`."""
    for parent, name, layer in layers_to_quantize(model):
        parts = (nn.Parameter(part, requires_grad=False) for part in quantize(layer.weight, mode))
        setattr(parent, name, NF4Linear(layer, *parts))
    for name, parameter in model.named_parameters():
        if dtype and parameter.is_floating_point() and not any(part in name for part in _NOT_OF_THE_BASE):
            parameter.data = parameter.data.to(dtype)


def round_to_quantized(model: nn.Module, mode: str) -> None:
    """Give the layers of a model that has its weights the values that a quantised one computes with, in float32."""
    for _, _, layer in layers_to_quantize(model):
        layer.weight.data = dequantize(*quantize(layer.weight, mode), torch.float32)


def dense_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state, as that of a model without quantised layers."""
    state = model.state_dict()
    for path, layer in model.named_modules():
        if isinstance(layer, NF4Linear):
            scales = state.pop(f"{path}.scales")
            state[f"{path}.weight"] = dequantize(state[f"{path}.weight"], scales, torch.float32)
    return state


class QuantizedSource:
    """A source of weights that also gives what is stored of quantised ones; each is read once, for both parts."""

    def __init__(self, source: FileSource | ModelSource, mode: str, device: torch.device) -> None:
        self._source, self._mode, self._device = source, mode, device
        self._made: dict[str, torch.Tensor] = {}

    @property
    def read_bytes(self) -> int:
        return self._source.read_bytes

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU.

        Raises:
            ProofFailed: what is stored of a weight is too far from it.
        """
        origin, suffix, _ = name.rpartition(":")
        if not suffix:
            return self._source.take(name)
        if name not in self._made:
            if isinstance(self._source, FileSource):
                self._source.dtypes[origin] = torch.float32
            weight = self._source.take(origin).to(self._device)
            stored = quantize(weight, self._mode)
            prove_quantized(origin, weight, *stored, self._mode)
            self._source.forget(origin)
            self._made |= {origin + suffix: part.cpu() for suffix, part in zip((_WEIGHT, _SCALES), stored, strict=True)}
        return self._made.pop(name)

    def forget(self, name: str) -> None:
        """Free a tensor; of quantised ones nothing is kept."""
        if ":" not in name:
            self._source.forget(name)

    def close(self) -> None:
        self._source.close()


def prove_quantized(name: str, weight: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, mode: str) -> None:
    """Raise `ProofFailed` unless each element of a quantised weight is as near to the weight as NF4 allows."""
    values = dequantize(packed, scales, torch.float32)
    blocks = weight.float().unflatten(1, (-1, NF4_BLOCK))
    largest = blocks.abs().amax(-1)
    low, high = largest.aminmax(dim=1, keepdim=True)
    limit = (largest + ((high - low) / 255 if mode == NF4_DOUBLE else 0)) * (REACH + 1e-5)
    far = ~((values.view_as(blocks) - blocks).abs() <= limit.unsqueeze(-1))
    if far.any():
        raise ProofFailed(
            f"loading: {name}: {int(far.sum())} of {weight.numel()} quantised elements differ from those of the file "
            f"by more than {REACH:.3f} of the largest in their block of {NF4_BLOCK}, or are not finite"
        )
