"""State of the process and thread that a stage's forward depends on, recorded for its recompute."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from ckptplan.state.flags import flags, set_flags
from ckptplan.state.modes import Modes
from ckptplan.state.put_back import Steps, enter
from ckptplan.state.variables import Variables
from ckptplan.tensors.accelerator import current_stream, has_generator, own_module, run_on


class Surroundings:
    """State that a forward depends on besides its module and arguments, recorded at construction.

    It consists of random states, flags, function and dispatch modes (the default device is one), autocast, Python's
    context variables and the stream. All of it may differ in backward. For example, if a stage ran an operation on a
    stream of its own, autograd may trigger the recompute on that stream; and it may do so in another thread, where
    context variables have their default values.

    Parameters
    ----------
    device : torch.device
        The state of its generator is recorded: a stage may draw from it without a tensor of that device among its
        arguments.
    tensors : iterable of torch.Tensor
        The states of the generators of their devices are recorded as well.

    Attributes
    ----------
    variables : Variables
        The context variables.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        devices = {device, *[t.device for t in tensors]}
        self._stream = current_stream(device)
        self._random = torch.get_rng_state()
        self._device_random = _device_states([d for d in devices if has_generator(d)])
        self._flags = flags()
        self._modes = Modes()
        self.variables = Variables()
        self._autocast = [_autocast(kind) for kind in {"cpu", *[d.type for d in devices]} if _has_autocast(kind)]

    def put(self, undo: Steps, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Restore the recorded state for a run on `tensors`, and append steps to `undo` that restore the present one.

        After these steps random generators continue as if nothing had run in between.
        """
        undo.append(functools.partial(_set_random_states, torch.get_rng_state(), _device_states(self._device_random)))
        _set_random_states(self._random, self._device_random)
        if self._stream is not None:
            enter(run_on(self._stream, tensors), undo)
        for state in self._autocast:
            if _autocast(state[0]) != state:
                enter(torch.autocast(*state), undo)
        now = flags()
        if now != self._flags:
            undo.append(functools.partial(set_flags, now))
            set_flags(self._flags)
        if self._modes.differ():
            enter(self._modes.active(), undo)


def _device_states(devices: Iterable[torch.device]) -> dict[torch.device, torch.Tensor]:
    return {device: own_module(device).get_rng_state(device) for device in devices}


def _set_random_states(cpu: torch.Tensor, devices: dict[torch.device, torch.Tensor]) -> None:
    torch.set_rng_state(cpu)
    for device, state in devices.items():
        own_module(device).set_rng_state(state, device)


@functools.cache
def _has_autocast(kind: str) -> bool:
    return kind != "meta" and torch.amp.is_autocast_available(kind)


def _autocast(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    """Return the autocast state for a kind of device, as arguments of `torch.autocast`."""
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
