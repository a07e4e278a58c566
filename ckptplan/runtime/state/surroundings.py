"""Process-wide state that a stage's forward depends on, kept for its next run."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ckptplan.runtime.accelerator import current_stream, has_generator, own_module, run_on
from ckptplan.runtime.recompute.put_back import Steps, enter
from ckptplan.runtime.state.flags import flags, set_flags
from ckptplan.runtime.state.modes import Modes

T = TypeVar("T")


class Surroundings:
    """What a forward depends on besides its module and arguments.

    Random states, flags, modes on functions and operations, autocast, the default device, Python's context variables
    and the stream. A backward may ask for a recompute on another stream, that of an operation which the stage ran
    elsewhere by itself; and in another thread, where context variables have their defaults.

    Parameters
    ----------
    device : torch.device
        Its generator is kept, since a stage may draw from it without a tensor of that device among its arguments.
    tensors : iterable of torch.Tensor
        The generators of their devices are kept too.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        devices = {device, *[t.device for t in tensors]}
        self._stream = current_stream(device)
        self._random = torch.get_rng_state()
        self._device_random = _device_states([d for d in devices if has_generator(d)])
        self._flags = flags()
        self._modes = Modes()
        self._variables = contextvars.copy_context()
        self._default_device = _default_device()
        self._autocast = [_autocast(kind) for kind in {"cpu", *[d.type for d in devices]} if _has_autocast(kind)]

    def put(self, undo: Steps, tensors: Sequence[torch.Tensor] = ()) -> None:
        """As it was, for a run on `tensors`; random states go on afterwards as if nothing had run in between."""
        undo.append(functools.partial(_set_random_states, torch.get_rng_state(), _device_states(self._device_random)))
        _set_random_states(self._random, self._device_random)
        if self._stream is not None:
            enter(run_on(self._stream, tensors), undo)
        for state in self._autocast:
            if _autocast(state[0]) != state:
                enter(torch.autocast(*state), undo)
        if _default_device() != self._default_device:
            enter(self._default_device, undo)
        now = flags()
        if now != self._flags:
            undo.append(functools.partial(set_flags, now))
            set_flags(self._flags)
        if self._modes.differ():
            enter(self._modes.active(), undo)

    def run(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call `function` with context variables as they were; what it sets them to is dropped."""
        return self._variables.copy().run(function, *args, **kwargs)


def _device_states(devices: Iterable[torch.device]) -> dict[torch.device, torch.Tensor]:
    return {device: own_module(device).get_rng_state(device) for device in devices}


def _set_random_states(cpu: torch.Tensor, devices: dict[torch.device, torch.Tensor]) -> None:
    torch.set_rng_state(cpu)
    for device, state in devices.items():
        own_module(device).set_rng_state(state, device)


_CPU = torch.device("cpu")


def _default_device() -> torch.device:
    """Where tensors are made by default, which only a mode on PyTorch's functions changes."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


@functools.cache
def _has_autocast(kind: str) -> bool:
    return kind != "meta" and torch.amp.is_autocast_available(kind)


def _autocast(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    """Autocast's state for a kind of device, as its constructor takes it."""
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
