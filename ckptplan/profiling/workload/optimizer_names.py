"""Optimizers by name: those of `transformers.TrainingArguments(optim=...)`, of axolotl, and PyTorch's.

What PyTorch and transformers implement is made by their own classes, with the settings that transformers' Trainer gives
them. Of bitsandbytes and torchao, which needn't be installed, `QuantizedState` makes the state in their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.units import format_bytes
from ckptplan.tensors.storages import local_part

PAGED_VALUES = 100_000
"""Values from which on bitsandbytes puts a paged state into managed memory."""
_LEAST_QUANTIZED = 4096  # values; smaller parameters keep unquantized state, in both packages


class QuantizedState(torch.optim.Optimizer):
    """Makes the state of an optimizer of bitsandbytes or torchao at its first `step`, and updates nothing.

    Their kernels update in place, without temporaries. Layouts: `bitsandbytes/optim/optimizer.py` (0.50) and
    `torchao/optim/subclass_*.py` (0.18); embeddings' states of 32 bits with bitsandbytes are the rule of transformers'
    Trainer.

    Parameters
    ----------
    model : nn.Module
        Its parameters that require gradients are updated.
    states : int
        States of each parameter: 2 for AdamW, 1 for Lion, 3 for AdEMAMix.
    bits : int
        Of one value of a state: 4, 8, or 32 (float32).
    block : int
        Values with one float32 scale.
    paged : bool
        States of `PAGED_VALUES` values and more lie in managed memory, which CUDA moves to the host when the device is
        full. They aren't made here.
    torchao : bool
        The layout is torchao's: `maps` tables a state, unquantized states are in the parameter's type, also where the
        values are no multiple of the block. Otherwise all parameters share two tables (one with one state).
    maps : bool
        Whether quantized states come with tables of the values that their codes stand for.
    """

    def __init__(
        self,
        model: nn.Module,
        states: int,
        bits: int,
        *,
        block: int = 256,
        paged: bool = False,
        torchao: bool = False,
        maps: bool = True,
    ) -> None:
        embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        self.states, self.block, self.paged, self.torchao, self.maps = states, block, paged, torchao, maps
        self._shared: list[torch.Tensor] = []
        groups: dict[int, list[nn.Parameter]] = {}
        for p in model.parameters():
            if p.requires_grad:
                groups.setdefault(32 if id(p) in embedded and not torchao else bits, []).append(p)
        super().__init__([{"params": params, "bits": width} for width, params in groups.items()], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state of the parameters that have a gradient and no state."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p] = self._made(p, group["bits"])

    def _made(self, p: torch.Tensor, bits: int) -> dict[str, Any]:
        values = p.numel()
        quantized = bits < 32 and values >= _LEAST_QUANTIZED and (not self.torchao or values % self.block == 0)
        state: dict[str, Any] = {"step": 0}
        if not quantized:
            dtype = p.dtype if self.torchao else torch.float32
            states = 0 if self._is_paged(p) else self.states
            return state | {f"state{n}": torch.zeros_like(p, dtype=dtype) for n in range(states)}
        for n in range(self.states):
            if not self._is_paged(p):
                state[f"state{n}"] = torch.zeros(values * bits // 8, dtype=torch.uint8, device=p.device)
            state[f"scale{n}"] = torch.zeros(-(-values // self.block), device=p.device)
            if self.torchao and self.maps:
                state[f"map{n}"] = torch.zeros(2**bits, device=p.device)
        if not self.torchao and not self._shared:
            self._shared = [torch.zeros(2**bits, device=p.device) for _ in range(min(self.states, 2))]
        return state

    def _is_paged(self, p: torch.Tensor) -> bool:
        return self.paged and p.numel() >= PAGED_VALUES

    @property
    def paged_bytes(self) -> int:
        """Bytes of the state in managed memory."""
        return sum(
            self.states * local_part(p).numel() * group["bits"] // 8
            for group in self.param_groups
            for p in group["params"]
            if self._is_paged(local_part(p))
        )


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices and AdamW for embeddings, the head and vectors, as axolotl's `muon`."""

    def __init__(self, model: nn.Module) -> None:
        outside = {id(p) for p in _embeddings(model)}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2 and id(p) not in outside]
        others = [p for p in trained if p.dim() != 2 or id(p) in outside]
        super().__init__(trained, {})
        self._parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices)] if matrices else []
        self._parts += [torch.optim.AdamW(others, foreach=False)] if others else []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update both."""
        for part in self._parts:
            part.step()


def _embeddings(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model's embeddings, and of its head if transformers knows it."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = [*(m for m in model.modules() if isinstance(m, nn.Embedding)), *([] if head is None else [head])]
    return [p for m in modules for p in m.parameters(recurse=False)]


def _of_torch(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: make([p for p in model.parameters() if p.requires_grad], **settings)


def _state(states: int, bits: int, **layout: Any) -> Callable[[nn.Module], Any]:
    return lambda model: QuantizedState(model, states, bits, **layout)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    try:
        from transformers.optimization import Adafactor
    except ImportError as error:
        raise InvalidInputError(
            "optimizer='adafactor' is transformers' Adafactor, as its Trainer makes it; pip install transformers, or "
            "pass torch.optim.Adafactor for PyTorch's"
        ) from error
    return _of_torch(Adafactor, lr=1e-3, scale_parameter=False, relative_step=False)(model)


NAMED: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": _of_torch(torch.optim.SGD, lr=0.1),
    "momentum": _of_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": _of_torch(torch.optim.RMSprop),
    "adagrad": _of_torch(torch.optim.Adagrad),
    "adam": _of_torch(torch.optim.Adam),
    "adamw": _of_torch(torch.optim.AdamW),
    "adamw_torch": _of_torch(torch.optim.AdamW),
    "adamw_torch_fused": _of_torch(torch.optim.AdamW, fused=True),
    "adafactor": _adafactor,
    "muon": Muon,
    "adamw_8bit": _state(2, 8),
    "adamw_bnb_8bit": _state(2, 8),
    "paged_adamw_8bit": _state(2, 8, paged=True),
    "paged_adamw_32bit": _state(2, 32, paged=True),
    "lion_8bit": _state(1, 8),
    "lion_32bit": _state(1, 32),
    "paged_lion_8bit": _state(1, 8, paged=True),
    "paged_lion_32bit": _state(1, 32, paged=True),
    "ademamix": _state(3, 32),
    "ademamix_8bit": _state(3, 8),
    "paged_ademamix_32bit": _state(3, 32, paged=True),
    "paged_ademamix_8bit": _state(3, 8, paged=True),
    "rmsprop_bnb": _state(1, 32),
    "rmsprop_bnb_8bit": _state(1, 8),
    "rmsprop_bnb_32bit": _state(1, 32),
    "adamw_torch_8bit": _state(2, 8, torchao=True),
    "adamw_torch_4bit": _state(2, 4, torchao=True),
    "ao_adamw_8bit": _state(2, 8, torchao=True),
    "ao_adamw_4bit": _state(2, 4, torchao=True, block=128),
    "ao_adamw_fp8": _state(2, 8, torchao=True, maps=False),
}
"""Name -> function from a model to the optimizer of its parameters that require gradients."""


def check_name(name: str) -> str:
    """Return the name of an optimizer in lower case.

    Raises
    ------
    InvalidInputError
        If it isn't known.
    """
    if name.lower() in NAMED:
        return name.lower()
    raise InvalidInputError(
        f"optimizer={name!r} is not known by name; counted by name are {', '.join(NAMED)}; pass an optimizer, its "
        "class, or a function from parameters to an optimizer for any other"
    )


def notes_on(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return what has to be said of how an optimizer's state is counted."""
    paged_bytes = optimizer.paged_bytes if isinstance(optimizer, QuantizedState) else 0
    if not paged_bytes:
        return []
    return [
        f"{format_bytes(paged_bytes)} of the optimizer's state are paged, in managed memory that CUDA moves to the host"
        " when the device is full: they aren't counted, and a device with that much more keeps them"
    ]
