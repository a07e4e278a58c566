"""Choose what a compiled module saves for its backward under a memory budget; imports the compiler, so import late."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import partition_fn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.training.compiled import owner_of, uncompiled_call

Partitioned = tuple[GraphModule, GraphModule]


class SavingDraws(CustomPartitionerFn):
    """The compiler's own choice of what to save under an `activation_memory_budget`, and all that draws random numbers.

    Without that, below a budget of 1 backward draws other numbers than forward did (pytorch#190717). Equal objects
    stand for equal code, in this process and in the compiler's caches on disk.

    Parameters
    ----------
    ratio : float
        Between 0 and 1: PyTorch's `activation_memory_budget`.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SavingDraws) and (type(other), other.ratio) == (type(self), self.ratio)

    def __hash__(self) -> int:
        return hash(self.ratio)

    def uuid(self) -> Any:
        """Return what tells it apart in the compiler's caches."""
        return "ckptplan", 1, self.ratio

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Partitioned:
        """Return the graphs of forward and backward."""
        for node in gm.graph.nodes:
            if _draws(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                node.meta["ac_graph_id"] = 0
        with config.patch(activation_memory_budget=self.ratio):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def _draws(node: Node) -> bool:
    """Whether an operation advances a random generator; attention is said to, and does so with dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments: list[Any] = getattr(getattr(node.target, "_schema", None), "arguments", [])
    for at, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return bool((node.args[at] if at < len(node.args) else default) != 0)
    return True


def saved_bytes(module: nn.Module, args: Any, kwargs: Any, ratios: Sequence[float]) -> dict[float, int]:
    """Return, per ratio, the bytes that a module compiled under it would save besides inputs and parameters.

    Its call is traced and runs once as it was traced; nothing is compiled. Nothing is found for one without backward.

    Raises
    ------
    UnsupportedModelError
        If the compiler can't take it as one graph.
    """
    found: dict[float, int] = {}

    def each(joint: GraphModule, inputs: Sequence[object], **how: Any) -> Partitioned:
        for ratio in ratios:
            forward, _ = SavingDraws(ratio)(copy.deepcopy(joint), inputs, **how)
            found[ratio] = _bytes(forward, how["num_fwd_outputs"])
        return min_cut_rematerialization_partition(joint, inputs, **how)

    def listing(joint: GraphModule, inputs: Sequence[object], **how: Any) -> Partitioned:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            return partition_fn(joint, inputs, partitioner_fn_override=each, compiler="inductor", **how)

    backend = aot_autograd(fw_compiler=_as_it_is, partition_fn=listing, decompositions=select_decomp_table())
    breaks = counters["graph_break"].total()
    # Without `fullgraph`: an error of the compiler's would leave its hook in Python's evaluation of frames.
    torch.compile(uncompiled_call(module), backend=backend, dynamic=False)(owner_of(module), *args, **kwargs)
    if counters["graph_break"].total() != breaks:
        raise UnsupportedModelError("its code has graph breaks; take them out (TORCH_LOGS=graph_breaks names them)")
    return found


def _as_it_is(graph: GraphModule, inputs: Sequence[object]) -> GraphModule:
    return graph


def _bytes(forward: GraphModule, outputs: int) -> int:
    """Bytes of what a graph of forward returns besides its outputs, each storage counted as what it shows of it."""
    (returned,) = next(node for node in reversed(forward.graph.nodes) if node.op == "output").args
    saved = {node for node in returned[outputs:] if isinstance(node, Node) and node.op != "placeholder"}
    values = (node.meta.get("val") for node in saved.difference(returned[:outputs]))
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
