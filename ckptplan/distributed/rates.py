"""The seconds of collectives between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ckptplan.core.device import Device


@dataclass(frozen=True, slots=True)
class Links:
    """The rates of collectives between ranks that are here; fields as in `Device`."""

    peer_bytes_per_s: float | None
    name: str = "here"
    machine_devices: int = 1 << 30
    network_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's modules by name, and the seconds of a gather in forward and in backward, and of its reductions."""

    names: tuple[str, ...]
    gather_s: float
    again_s: float
    reduce_s: float

    def seconds(self, calls: int) -> tuple[float, float]:
        """Return the seconds in forward and in backward; a unit that stays whole gathers for the first call alone."""
        return self.gather_s * (calls if self.again_s else 1), self.again_s * calls + self.reduce_s


def holds(module: str, stage: str) -> bool:
    """Whether a module, by its name, is a stage's module or one around it."""
    return not module or stage == module or stage.startswith(f"{module}.")


def ring_s(nbytes: float, ranks: int, device: Device | Links) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all, over a ring of `ranks` devices.

    Each device sends and receives (ranks - 1) / ranks of the bytes (Thakur et al., Optimization of Collective
    Communication Operations in MPICH, 2005).
    """
    return 0.0 if ranks == 1 else nbytes * (ranks - 1) / ranks / bytes_per_s(ranks, device)


def bytes_per_s(ranks: int, device: Device | Links) -> float:
    """Return the rate between devices of a machine, or between machines where that is less."""
    assert device.peer_bytes_per_s is not None
    if ranks > device.machine_devices and device.network_bytes_per_s is not None:
        return min(device.peer_bytes_per_s, device.network_bytes_per_s)
    return device.peer_bytes_per_s
