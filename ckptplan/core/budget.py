"""A budget in words: bytes with a unit, a share of the way from the smallest peak to everything kept, or "auto"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptplan.core.checks import MOST_BYTES
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.units import budget_to_bytes, format_bytes

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
          "TIB": 1 << 40}  # fmt: skip
AUTO_MARGIN = 0.05
"""Share of the free memory that "auto" leaves: for the libraries' own buffers, which no profile has."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may hold on the device.

    Attributes
    ----------
    nbytes : int or None
        A fixed limit.
    share : float or None
        In place of it, a share of the way from the smallest peak (0) to everything kept (1).
    margin : float
        Where neither is given, the limit is the device's free memory but for this share of it.
    """

    nbytes: int | None = None
    share: float | None = None
    margin: float = 0.0

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:.0%} of the way from the smallest peak to everything kept"
        if self.nbytes is not None:
            return format_bytes(self.nbytes)
        return f"the device's free memory{f', less {self.margin:.0%}' if self.margin else ''}"

    @classmethod
    def of(cls, budget_gb: float | None, budget: str | None) -> Budget:
        """Return the budget that a call's two options give.

        Parameters
        ----------
        budget_gb : float, optional
            In units of 2**30 bytes.
        budget : str, optional
            "12 GiB" or "12 GB" (10**9 bytes each), "50%", or "auto".

        Raises
        ------
        InvalidInputError
            If both are given, or one can't be read.
        """
        if budget is None:
            return cls(None if budget_gb is None else budget_to_bytes(budget_gb))
        if budget_gb is not None:
            raise InvalidInputError(f"budget_gb={budget_gb!r} and budget={budget!r} are both given; pass one of them")
        text = budget.strip() if isinstance(budget, str) else ""
        if text == "auto":
            return cls(margin=AUTO_MARGIN)
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|[KMGT]?i?B)", text, re.IGNORECASE)
        value = 0.0 if found is None else float(found[1])
        if found is not None and found[2] == "%" and value <= 100:
            return cls(share=value / 100)
        nbytes = 0 if found is None else int(value * _UNITS.get(found[2].upper(), 0))
        if not 0 < nbytes < MOST_BYTES:
            raise InvalidInputError(
                f"budget={budget!r} can't be read; give bytes as '12 GiB' or '800 MB', a share of the way from the "
                "smallest peak to everything kept as '50%', or 'auto' for the free memory less a margin"
            )
        return cls(nbytes)
