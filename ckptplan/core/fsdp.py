"""The settings of fully sharded data parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptplan.core.checks import check_whole, is_int
from ckptplan.core.errors import InvalidInputError

_DTYPES = (None, "bfloat16", "float16", "float32")
_MOST_RANKS = 1 << 16
WITH_WHOLE_GRADIENTS = ", whole gradients"
"""End of the kind of a sharded model whose gradients stay whole between micro-batches."""


def is_sharding(kind: str) -> bool:
    """Whether a kind of training (`Fingerprint.parallel`) is that of a sharded model."""
    return kind.startswith("fsdp")


@dataclass(frozen=True, slots=True)
class FSDP:
    """Settings with which a model is to be sharded (FSDP2, `torch.distributed.fsdp.fully_shard`).

    Source: Zhao et al., PyTorch FSDP, VLDB 2023; the tensors are those that PyTorch's own code makes.

    Parameters
    ----------
    ranks : int
        Number of ranks over which parameters, gradients and optimizer state are sharded.
    replicas : int
        Number of such groups, between which gradients are all-reduced (hybrid sharding).
    units : tuple of str, optional
        The modules that are units, by class or by qualified name. By default those that the model names in
        `_no_split_modules`, or else the members of its lists of alike modules (`torch.nn.ModuleList`), without those
        that share a parameter with others. The model itself is always one.
    reshard_after_forward : bool or int, optional
        As in `fully_shard`, for all units. None: true for all but the model itself.
    param_dtype, reduce_dtype : str, optional
        "bfloat16", "float16" or "float32": those of `torch.distributed.fsdp.MixedPrecisionPolicy`.
    """

    ranks: int
    replicas: int = 1
    units: tuple[str, ...] | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        check_whole("fsdp", 2, _MOST_RANKS, ranks=self.ranks)
        check_whole("fsdp", 1, _MOST_RANKS, replicas=self.replicas)
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            value = None if value is None else str(value).removeprefix("torch.")
            object.__setattr__(self, name, value)
            if value not in _DTYPES:
                raise InvalidInputError(f"fsdp: {name}={value!r}; it is {', '.join(map(repr, _DTYPES))}")
        reshard = self.reshard_after_forward
        if not (reshard is None or isinstance(reshard, bool) or is_int(reshard)):
            raise InvalidInputError(f"fsdp: reshard_after_forward={reshard!r}; it is True, False, None or a number")
        if is_int(reshard) and not isinstance(reshard, bool) and (not 1 < reshard < self.ranks or self.ranks % reshard):
            raise InvalidInputError(
                f"fsdp: reshard_after_forward={reshard} must divide the {self.ranks} ranks, and be neither 1 nor all"
            )
        units: object = self.units
        if units is not None:
            if not isinstance(units, (tuple, list)) or not all(isinstance(unit, str) for unit in units):
                raise InvalidInputError(
                    f"fsdp: units={units!r}; give names of classes or modules: ('LlamaDecoderLayer', 'lm_head')"
                )
            object.__setattr__(self, "units", tuple(units))

    @classmethod
    def of(cls, value: FSDP | int | None) -> FSDP | None:
        """Return the settings that the keyword `fsdp` stands for: a number is that of ranks.

        Raises
        ------
        InvalidInputError
        """
        if value is None or isinstance(value, cls):
            return value
        if not is_int(value):
            raise InvalidInputError(f"fsdp={value!r}; it is a number of ranks or a ckptplan.FSDP")
        return cls(value)

    @classmethod
    def from_text(cls, text: str) -> FSDP:
        """Return the settings in a text such as "8" or "8,param_dtype=bfloat16,reshard_after_forward=no".

        Raises
        ------
        InvalidInputError
        """
        ranks, *others = (part.strip() for part in text.split(","))
        read: dict[str, Callable[[str], Any]] = {
            "replicas": _number,
            "units": lambda names: tuple(names.split("+")),
            "reshard_after_forward": lambda value: _SWITCHES.get(value.lower(), _number(value)),
            "param_dtype": str,
            "reduce_dtype": str,
        }
        settings = {}
        for part in others:
            name, _, value = part.partition("=")
            if name not in read:
                raise InvalidInputError(
                    f"fsdp: {text!r} has {part!r}; after the number of ranks come any of {', '.join(read)}, with a "
                    "value each, such as param_dtype=bfloat16; units are joined by +"
                )
            settings[name] = read[name](value)
        return cls(_number(ranks), **settings)


def _number(text: str) -> Any:
    """Return the number in `text`, or the text, which the checks refuse with its name."""
    return int(text) if text.isdecimal() else text


_SWITCHES = {"yes": True, "true": True, "no": False, "false": False}
