"""Gradients that exist when a step starts: their bytes, and stand-ins for measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.distributed import parallel_of
from ckptplan.tensors.private import is_traceable_wrapper_subclass
from ckptplan.tensors.storages import local_part, storages_of


def accumulates(model: nn.Module, wanted: bool | None) -> bool:
    """Whether steps of `model` start with gradients.

    Parameters
    ----------
    wanted : bool or None
        The answer, if given; None: whether any parameter has a gradient now.

    Raises
    ------
    InvalidInputError
        If `wanted` is neither a bool nor None.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidInputError(f"accumulate={wanted!r}; it is True, False or None")
    gradients = any(p.requires_grad and p.grad is not None for p in model.parameters())
    return bool(gradients or parallel_of(model).whole_gradients()) if wanted is None else wanted


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor like `tensor`; for a DTensor, of its local part, with padding."""
    if (local := local_part(tensor)) is not tensor:
        return local.untyped_storage().nbytes()
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]
    return sum(_dense_bytes(t) for t in inside if isinstance(t, torch.Tensor))


def starting_gradient_bytes(model: nn.Module, round_to: int = 1, *, whole: bool | None = None) -> int:
    """Return the bytes of gradients with which a step of `model` starts that accumulates, each rounded up.

    Parameters
    ----------
    whole : bool, optional
        Whether those of sharded parameters are whole; default: as the model keeps them now.
    """
    sizes = starting_gradients(model, whole=whole).values()
    return sum(-(-nbytes // round_to) * round_to for nbytes in sizes)


def starting_gradients(model: nn.Module, *, whole: bool | None = None) -> dict[str, int]:
    """Return the bytes of each of those gradients, by the parameter's name."""
    parallel = parallel_of(model)
    known = parallel.whole_gradient_bytes() if (parallel.keeps_whole if whole is None else whole) else {}
    return {
        name: known[id(p)] if id(p) in known else _dense_bytes(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def existing_gradient_bytes(gradients: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of gradients, including sparse ones."""
    parts = (part for gradient in gradients for part in _parts(gradient))
    return sum({s._cdata: s.nbytes() for part in parts for s in storages_of(part)}.values())


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (gradient._indices(), gradient._values()) if gradient.layout is torch.sparse_coo else (gradient,)


def rewinding(model: nn.Module, rewind: Callable[[], None], *, accumulates: bool) -> Callable[[], None]:
    """Return a function that calls `rewind` and, if steps start with gradients, gives every parameter one.

    These have the values of the user's gradients, or zeros for parameters without one; the user's own stay unchanged.
    Must be called before the first `rewind`, which drops the gradients to copy.
    """
    if not accumulates:
        return rewind
    parallel = parallel_of(model)
    whole = parallel.whole_gradient_bytes() if parallel.keeps_whole else {}
    with torch.no_grad():
        made = [
            (p, p.grad, torch.zeros_like(p) if p.grad is None else p.grad.detach().clone())
            for p in model.parameters()
            if p.requires_grad and id(p) not in whole
        ]

    def rewound() -> None:
        rewind()
        if whole:
            parallel.give_whole_gradients()
        with torch.no_grad():
            for parameter, before, stand_in in made:
                parameter.grad = stand_in
                if before is None:
                    stand_in.zero_()
                else:
                    stand_in.copy_(before)

    return rewound
