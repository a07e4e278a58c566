"""Processes of one group over gloo, each of which runs the same functions."""

from __future__ import annotations

import datetime
import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 120.0


class Ranks:
    """The processes; `run` calls a function in each."""

    def __init__(self, pipes: list[Any], processes: list[Any]) -> None:
        self._pipes, self.processes = pipes, processes

    def run(self, function: Callable[..., Any], *args: Any, each: list[tuple[Any, ...]] | None = None) -> list[Any]:
        """Return what `function` returns by rank, the exception where it raises one; `each` has a rank's arguments."""
        self.send(function, each or [args] * len(self._pipes))
        return [self.receive(rank) for rank in range(len(self._pipes))]

    def send(self, function: Callable[..., Any], each: list[tuple[Any, ...]]) -> None:
        """Have `function` called with a rank's arguments."""
        for pipe, own in zip(self._pipes, each, strict=True):
            pipe.send((function, own))

    def receive(self, rank: int, limit_s: float = TIMEOUT_S) -> Any:
        """Return what a rank's call returned, or its exception."""
        try:
            found = self._pipes[rank]
            return found.recv() if found.poll(limit_s) else TimeoutError(f"rank {rank} doesn't answer")
        except EOFError:
            return RuntimeError(f"rank {rank} has ended")

    def good(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `function` returns by rank; raise the first error."""
        found = self.run(function, *args)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found


@contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """Start `count` processes."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_serve, args=(rank, count, folder, end[1], sys.path), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        try:
            yield Ranks([end[0] for end in ends], processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, count: int, folder: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    importlib.import_module("torch_setup")
    store = dist.FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(*args))
        except BaseException as error:  # pytest's own are none of Exception
            error.add_note("".join(traceback.format_exception(error)))
            try:
                pipe.send(error)
            except Exception:
                pipe.send(RuntimeError(traceback.format_exc()))
