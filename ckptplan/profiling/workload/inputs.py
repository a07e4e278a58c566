"""Inputs for a model that is given without any: recorded, declared, or derived from its first layer."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.tensors.storages import tensors_in
from ckptplan.training.step import TrainingStep

_recorded: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()


def record_forward(model: nn.Module) -> Any:
    """Remember the inputs of the last forward of `model`, for `solve(model)` without inputs.

    Returns
    -------
    torch.utils.hooks.RemovableHandle
        Its `remove()` ends the recording.
    """

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _recorded[module] = (args, kwargs)

    return model.register_forward_pre_hook(remember, with_kwargs=True)


def find_inputs(model: nn.Module, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Positional and keyword inputs for `model`, and their source.

    Sources in order of preference: the last recorded forward, Lightning's `example_input_array`, the Hugging Face
    config, a leading Linear, Embedding or convolution.

    Raises
    ------
    InvalidInputError
        If none of these is enough; shows how to pass inputs.
    """
    if model in _recorded:
        args, kwargs = _recorded[model]
        return args, kwargs, "from the last recorded forward"
    example = getattr(model, "example_input_array", None)
    if example is not None:
        if isinstance(example, dict):
            return (), _to(example, device), "from example_input_array"
        listed = list(example) if isinstance(example, tuple) else [example]
        return tuple(_to(listed, device)), {}, "from example_input_array"
    hugging = _from_config(model, device)
    if hugging is not None:
        return (), hugging, "guessed from the model's Hugging Face config"
    leading = _leading(model, device)
    if leading is not None:
        return (leading,), {}, "guessed from the model's first layer"
    raise InvalidInputError(
        f"no inputs can be derived from this {type(model).__name__}; pass them: solve(model, budget_gb=..., inputs=x) "
        "for model(x), inputs=(x, y) for model(x, y), inputs={'x': x} for model(x=x); or call ckptplan.apply(model, "
        "budget_gb=...), which plans for the inputs of the first training forward"
    )


def resized(inputs: Any, n: int) -> Any:
    """`inputs` with `n` samples: the first dimension of every tensor repeated and cut; floating ones on `meta`.

    Raises
    ------
    InvalidInputError
        Unless all tensors that have a first dimension have the same one.
    """
    tensors = [t for t in tensors_in(inputs) if t.dim()]
    sizes = {t.shape[0] for t in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInputError(
            f"the inputs' first dimensions are {', '.join(map(str, sorted(sizes))) or 'missing'}, so the batch size "
            "isn't known; give a function of the batch size that makes model and inputs: def build(batch=1)"
        )

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        shape = (n, *tensor.shape[1:])
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(n, device=tensor.device) % len(tensor)]

    return torch.utils._pytree.tree_map_only(torch.Tensor, resize, inputs)


def padded(step: TrainingStep) -> list[TrainingStep]:
    """Return a step like `step` whose masks have a zero at the end of the first row, if they have none; none otherwise.

    Masks are the keyword inputs with "mask" in their name that have a row per sample and only ones (or True).
    """
    masks = {
        name: mask
        for name, mask in step.kwargs.items()
        if "mask" in name and isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] > 1
        and not mask.is_floating_point() and not mask.is_meta and bool(mask.all())
    }  # fmt: skip
    if not masks:
        return []
    changed = {name: mask.clone() for name, mask in masks.items()}
    for mask in changed.values():
        mask[0, -1] = 0
    return [dataclasses.replace(step, kwargs={**step.kwargs, **changed})]


def _to(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), tree)


def _from_config(model: nn.Module, device: torch.device) -> dict[str, Any] | None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width, device=device)}
    vocabulary = getattr(config, "vocab_size", None)
    if main != "input_ids" or vocabulary is None:
        return None
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 512
    ids = torch.zeros(1, min(int(positions), 512), dtype=torch.long, device=device)
    out: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        out["decoder_input_ids"] = ids
    if any(word in type(model).__name__ for word in ("LMHead", "ForCausalLM", "ForMaskedLM", "ConditionalGeneration")):
        out["labels"] = ids
    return out


def _leading(model: nn.Module, device: torch.device) -> torch.Tensor | None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return torch.zeros(32, module.in_features, device=device, dtype=module.weight.dtype)
        if isinstance(module, nn.Embedding):
            return torch.zeros(1, 128, device=device, dtype=torch.long)
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            side = {1: 1024, 2: 64, 3: 16}[len(module.kernel_size)]
            return torch.zeros(
                2, module.in_channels, *(side,) * len(module.kernel_size), device=device, dtype=module.weight.dtype
            )
        if next(module.parameters(recurse=False), None) is not None:
            return None
    return None
