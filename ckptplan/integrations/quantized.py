"""Linear layers whose frozen weights are quantized, in the layout of bitsandbytes, which needn't be installed.

Only bytes are followed: models are on `meta`, and no value is computed. Sources: `bitsandbytes/functional.py`
(`QuantState`), `bitsandbytes/autograd/_functions.py` (`MatMul4Bit`, `MatMul8bitLt`) and `bitsandbytes/nn/modules.py` of
0.50; `peft/tuners/lora/bnb.py` of 0.21; `transformers/quantizers/base.py` and `integrations/bitsandbytes.py` of 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

BLOCK = 64
"""Values of a weight with one largest absolute value (absmax)."""
NESTED_BLOCK = 256
"""Such values that are quantized together again, to one byte each (double quantization)."""


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight of 4 or 8 bits.

    Of what bitsandbytes keeps beside the codes, the few numbers of a layer are one tensor here, and the table of 1 KiB
    that all layers share is left out: a trace takes time for each tensor.

    Parameters
    ----------
    full : nn.Linear or transformers.pytorch_utils.Conv1D
        The layer whose place it takes; products of 4-bit weights are in the type of its weight.
    bits : int
        4: NF4 with double quantization, its codes stored in the weight's type; 8: LLM.int8.
    """

    absmax: torch.Tensor

    def __init__(self, full: Any, bits: int) -> None:
        nn.Module.__init__(self)
        weight: torch.Tensor = full.weight
        rows, columns = weight.shape if isinstance(full, nn.Linear) else weight.shape[::-1]
        self.in_features, self.out_features, self.bits, self.compute = columns, rows, bits, weight.dtype
        self.bias = full.bias
        if bits == 8:
            self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.int8), requires_grad=False)
            self.register_buffer("scales", torch.empty(rows))
            return
        codes = torch.empty(-(-rows * columns // (2 * weight.itemsize)), 1, dtype=weight.dtype)
        self.weight = nn.Parameter(codes, requires_grad=False)
        blocks = -(-rows * columns // BLOCK)
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8))
        # The absmax of blocks of absmax, their offset, and the values that the 16 codes stand for.
        self.register_buffer("numbers", torch.empty(-(-blocks // NESTED_BLOCK) + 1 + 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times the weight, in the type of `x`."""
        given = x if self.bits == 8 else x.to(self.compute)
        out: torch.Tensor = _Product.apply(given, self)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the full weight's size, as a kernel makes it for one product."""
        absmax = self.absmax.to(torch.float32) if self.bits == 4 else None
        # Zeros are written, as the kernel's result is: their time counts.
        weight = self.weight.new_zeros(self.out_features, self.in_features, dtype=dtype)
        del absmax
        return weight


class _Product(torch.autograd.Function):
    """A product that saves its input with 8 bits only, and dequantizes the weight in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        if layer.bits == 4:
            return linear(x, layer.dequantized(x.dtype), bias)
        ctx.save_for_backward(x)
        codes = x.to(torch.float16).to(torch.int8)
        sums = codes.new_zeros(*x.shape[:-1], layer.out_features, dtype=torch.int32)
        out = sums.to(x.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient.matmul(ctx.layer.dequantized(gradient.dtype)), None


def quantize(model: nn.Module, bits: int) -> None:
    """Freeze a model of transformers and quantize its linear layers, except its head and the last parameter's layer."""
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[operator]
    *_, (last, _) = model.named_parameters()
    with torch.device("meta"):
        for name, module in list(model.named_modules()):
            if type(module) in (nn.Linear, Conv1D) and module is not head and name != last.rpartition(".")[0]:
                model.set_submodule(name, QuantizedLinear(module, bits))


def has_4_bits(model: nn.Module) -> bool:
    """Whether a model has weights of 4 bits."""
    return any(isinstance(m, QuantizedLinear) and m.bits == 4 for m in model.modules())


def raise_others(model: nn.Module) -> None:
    """Cast all 16-bit parameters but quantized weights to float32, as `peft.prepare_model_for_kbit_training` does."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, QuantizedLinear)}
    for p in model.parameters():
        if p.dtype in (torch.float16, torch.bfloat16) and id(p) not in weights:
            p.data = p.data.to(torch.float32)


def lora_layer(bits: int) -> type[nn.Module]:
    """Return peft's layer of an adapter on a quantized layer, which under autocast doesn't cast its input."""
    from peft.tuners.lora.layer import Linear

    class QuantizedLora(Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(x, *args, **kwargs)
            result = result.clone() if bits == 4 else result
            for adapter in self.active_adapters:
                down, up = self.lora_A[adapter], self.lora_B[adapter]
                given = x if torch.is_autocast_enabled(x.device.type) else x.to(down.weight.dtype)  # type: ignore[arg-type]
                added = up(down(self.lora_dropout[adapter](given))) * self.scaling[adapter]
                result = result + added.to(result.dtype)
            return result

    return QuantizedLora
