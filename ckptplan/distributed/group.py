"""Calls that all ranks of a group make together: they exchange values, and an error on one is an error on all.

NOTE [Calls of a group]
Ranks that hold different plans, or of which one has failed, wait for each other in collectives for ever. So `profile`,
`solve`, `apply` and `verify` of a replicated model end alike on all ranks:

1. Values go through the store by which the group was made, not through collectives. So it doesn't matter which backend
   the group has, nothing is on the device, and a rank that waits can look at the others.
2. A rank that raises stores its error, which those that wait raise as well. Every call ends with an exchange.
3. Each rank stores a beat every second while it is in a call. One whose beats stop has ended or hangs, which the others
   raise. One that hasn't begun yet may be late; after `ARRIVAL_S` that is an error, too.

4. Between calls, forwards of a sharded model are made by all ranks together: plans with segments gather more often, so
   ranks with different plans would wait for each other. A `Vote` finds out whether any rank needs another plan.

Example: the forward of rank 1 of 4 fails on its batch. The others, which have profiled theirs and wait for it, raise an
`InvalidInputError` as well, "rank 1: ...", within a second.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ckptplan.core.errors import CkptPlanError, RankError
from ckptplan.distributed import is_distributed, parallel_of

_LOG = logging.getLogger("ckptplan")
_BEAT_S = 1.0
_POLL_S = 0.05
SILENT_S = 25.0
"""Seconds without a beat after which a rank counts as ended."""
ARRIVAL_S = 600.0
"""Longest wait for a rank to begin a call; it may load data or write a checkpoint meanwhile."""
_PATIENT_S = 10.0

_begun: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""(kind of exchange, ranks of a group) -> number of exchanges that this process has begun."""
_stored: dict[tuple[int, ...], list[tuple[Any, list[str]]]] = defaultdict(list)
"""Ranks of a group -> this process's keys of its last calls."""


def _stores(kind: str, ranks: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a new place in the store of the group, and the same by a connection of its own."""
    _begun[kind, ranks] += 1
    c10d: Any = dist.distributed_c10d  # not in each build of PyTorch
    whole, place = c10d._get_default_store(), f"ckptplan/{'-'.join(map(str, ranks))}/{kind}/{_begun[kind, ranks]}"
    return c10d.PrefixStore(place, whole), c10d.PrefixStore(place, whole.clone())


class GroupCall:
    """One call that all ranks of a group make.

    Attributes
    ----------
    ranks : list of int
    rank : int
        This process's place among them.
    """

    def __init__(self, name: str, ranks: list[int], rank: int) -> None:
        self.ranks, self.rank, self._name = ranks, rank, name
        self._store, self._beats = _stores("call", tuple(ranks))
        self._keys = [f"{kind}/{rank}" for kind in ("beat", "error")]
        _stored[tuple(ranks)].append((self._store, self._keys))
        self._round = itertools.count()
        self._ended = threading.Event()
        self._begun = time.monotonic()
        self._last: dict[int, tuple[bytes, float]] = {}
        self._said = False
        self._answers = True
        self._beat = threading.Thread(target=self._keep_beating, name="ckptplan beats", daemon=True)

    def __enter__(self) -> GroupCall:
        self._beat.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None:
                self.exchange(None)
                self._forget()
            elif self._answers and not hasattr(error, _TOLD):
                with contextlib.suppress(RankError):
                    self._ask(lambda: self._store.set(f"error/{self.rank}", _packed(error)))
        finally:
            self._ended.set()
            self._beat.join(_PATIENT_S if self._answers else 0)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values that the ranks give, in order.

        Raises
        ------
        RankError
            If a rank has failed, has ended, or makes another call.
        """
        number = next(self._round)
        self._keys.append(f"{number}/{self.rank}")
        self._ask(functools.partial(self._store.set, self._keys[-1], pickle.dumps((self._name, value))))
        found = []
        for rank in range(len(self.ranks)):
            name, given = pickle.loads(self._wait(f"{number}/{rank}", rank))
            if name != self._name:
                raise RankError(
                    f"rank {self.ranks[rank]} calls {name} where rank {self.ranks[self.rank]} calls {self._name}; make "
                    "the same calls in the same order on all ranks",
                    rank=self.ranks[rank],
                )
            found.append(given)
        return found

    def local_count(self) -> int:
        """Return the number of ranks on this machine."""
        return self.exchange(socket.gethostname()).count(socket.gethostname())

    def _forget(self) -> None:
        """Delete this rank's values of the call before: all ranks have begun this one, so they have read them."""
        calls = _stored[tuple(self.ranks)]
        for store, keys in calls[:-1]:
            for key in keys:
                store.delete_key(key)
        del calls[:-1]

    def _wait(self, key: str, rank: int) -> bytes:
        while (found := self._read(key)) is None:
            self._look_at_all()
            time.sleep(_POLL_S)
        return found

    def _read(self, key: str) -> bytes | None:
        """Return a value of the store, None if there is none yet."""
        found: bytes | None = self._ask(lambda: bytes(self._store.get(key)) if self._store.check([key]) else None)
        return found

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return what a call of the store returns; made in a thread, since a store may not answer.

        Raises
        ------
        RankError
        """
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

        asking = threading.Thread(target=ask, name="ckptplan store", daemon=True)
        asking.start()
        asking.join(SILENT_S)
        if found and not isinstance(found[0], Exception):
            return found[0]
        why = f"can't be reached ({found[0]})" if found else f"hasn't answered for {SILENT_S:.0f} s"
        self._answers = False
        raise RankError(
            f"{self._name}: the process group's store {why}: its rank, usually 0, has ended or hangs; see its output",
            rank=self.ranks[0],
        )

    def _look_at_all(self) -> None:
        """Raise if a rank has failed, has ended or doesn't come."""
        now = time.monotonic()
        for rank, name in enumerate(self.ranks):
            if rank == self.rank:
                continue
            if (told := self._read(f"error/{rank}")) is not None:
                raise _unpacked(told, name)
            if (beat := self._read(f"beat/{rank}")) is not None:
                before, since = self._last.get(rank, (b"", now))
                self._last[rank] = (beat, since if beat == before else now)
                if now - self._last[rank][1] > SILENT_S and beat != _DONE:
                    raise RankError(
                        f"{self._name}: rank {name} has given no sign for {SILENT_S:.0f} s: it has ended or hangs; see "
                        "its own output",
                        rank=name,
                    )
            elif now - self._begun > ARRIVAL_S:
                raise RankError(
                    f"rank {name} hasn't called {self._name} in {ARRIVAL_S:.0f} s; call it on all ranks of the model's "
                    "group, or for the model inside (model.module) on one",
                    rank=name,
                )
            elif now - self._begun > _PATIENT_S and not self._said:
                self._said = True
                _LOG.warning("ckptplan: %s waits for rank %d, which has to call it, too", self._name, name)

    def _keep_beating(self) -> None:
        with contextlib.suppress(Exception):  # without the store, the others will see no more beats
            for number in itertools.count():
                self._beats.set(f"beat/{self.rank}", str(number))
                if self._ended.wait(_BEAT_S):
                    self._beats.set(f"beat/{self.rank}", _DONE.decode())
                    return


_DONE = b"done"
_OF_VOTES = ("came", "yes", "answer")


class Vote:
    """Votes of a sharded model's ranks, at points that all of them reach: whether something is true on any rank.

    Parameters
    ----------
    model : nn.Module
        If it isn't sharded, only this rank's value counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ranks: tuple[int, ...] | None = None
        self._number = 0

    def _begin(self) -> tuple[int, ...]:
        """Return the ranks, found at the first vote: the model may have been sharded since."""
        parallel = parallel_of(self._model)
        self._ranks = tuple(parallel.ranks) if parallel.in_step and is_distributed() else ()
        if len(self._ranks) > 1:
            _, self._store = _stores("vote", self._ranks)
        return self._ranks

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank.

        Raises
        ------
        RankError
            If a rank doesn't vote within the timeout of the group's store.
        """
        ranks = self._begin() if self._ranks is None else self._ranks
        if len(ranks) < 2:
            return value
        self._number += 1
        came, yes, answer = (f"{self._number}/{what}" for what in _OF_VOTES)
        try:
            if value:
                self._store.set(yes, b"")
            if self._store.add(came, 1) == len(ranks):
                self._store.set(answer, str(self._store.check([yes])))
            found: bool = self._store.get(answer) == b"True"  # `get` waits for the answer
            if dist.get_rank() == ranks[0]:  # all have begun this one, so they have read the one before
                for what in _OF_VOTES:
                    self._store.delete_key(f"{self._number - 1}/{what}")
        except RuntimeError as error:
            raise RankError(
                f"a rank hasn't begun a forward that the others have, or has ended ({error}); see its own output",
                rank=dist.get_rank(),
            ) from error
        return found


_TOLD = "_told"
"""Attribute of an error that came from another rank, so that it isn't stored again."""


def _packed(error: BaseException) -> bytes:
    """Return an error for the store; one that isn't this package's becomes a text."""
    if isinstance(error, CkptPlanError):
        with contextlib.suppress(Exception):
            return pickle.dumps(error)
    return pickle.dumps(f"{type(error).__name__}: {error}")


def _unpacked(data: bytes, rank: int) -> CkptPlanError:
    """Return the error of another rank, with the rank in its message: a `RankError` if it isn't this package's."""
    found = pickle.loads(data)
    error = found if isinstance(found, CkptPlanError) else RankError(found, rank=rank)
    error.args = (f"rank {rank}: {error}",)
    vars(error)[_TOLD] = True
    return error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make calls of this rank alone within the block, in this thread: the others can't be expected to make them."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


_alone = ContextVar("alone", default=False)


@contextlib.contextmanager
def group_call(name: str, model: nn.Module, coming: object = None) -> Iterator[GroupCall | None]:
    """Yield a call of all ranks over which a model is, or will be, replicated or sharded; None if it is on one rank.

    Parameters
    ----------
    name : str
        Name of the public call.
    coming : object, optional
        The settings with which the model is to be wrapped or sharded, in the default group.
    """
    ranks: list[int] = []
    if is_distributed() and not _alone.get():
        ranks = list(parallel_of(model).ranks or (range(dist.get_world_size()) if coming else ()))
    if len(ranks) < 2:
        yield None
        return
    with GroupCall(name, ranks, ranks.index(dist.get_rank())) as call:
        before = _present.set(call)
        try:
            yield call
        finally:
            _present.reset(before)


_present: ContextVar[GroupCall | None] = ContextVar("present", default=None)


def present_call() -> GroupCall | None:
    """Return the innermost call of a group that this one is a part of; None: there is none."""
    return None if _alone.get() else _present.get()


F = TypeVar("F", bound=Callable[..., Any])


def on_all_ranks(function: F) -> F:
    """Return a function of a model that ends alike on all ranks over which the model is replicated or sharded."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with group_call(function.__name__, model):
            return function(model, *args, **kwargs)

    return run  # type: ignore[return-value]
