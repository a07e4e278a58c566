"""Run a model without memory for its activations: fake parameters, fake floating tensors, real integers.

Integers and booleans stay real because models read them, for instance to see whether a mask is all ones or positions
restart. They are small next to activations, and with them the fake run takes the same path as the real one. Results
that depend on the values of fake tensors are taken from a real run (NOTE [Answers] in values/answers.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils.weak import WeakIdKeyDictionary

from ckptplan.core.errors import CkptPlanError
from ckptplan.distributed import parallel_of
from ckptplan.profiling.bytes.layouts import Layouts
from ckptplan.profiling.bytes.operations import Operands, TensorSpec, op_key
from ckptplan.profiling.target import ON_CPU, Target
from ckptplan.profiling.values.answers import (
    PACK,
    READ_ARRAY,
    Answer,
    Answers,
    NeedsValues,
    Phase,
    Question,
    all_readable,
    around_forwards,
    readable,
    reading_watched,
    reads_values,
)
from ckptplan.profiling.values.compiled import compiled_as_noted
from ckptplan.profiling.values.constants import Constants
from ckptplan.profiling.workload.stand_ins import READ_LIMIT
from ckptplan.state.modes import Stacks
from ckptplan.state.restore import beside
from ckptplan.tensors.private import FakeTensor, FakeTensorMode, TorchDispatchMode, current_node, is_fake, make_subclass
from ckptplan.tensors.quantized import attributes_beside
from ckptplan.tensors.storages import tensors_in

_MISREPORTED = {
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten.cudnn_batch_norm.default,
}
"""Operations whose fake kernel returns a workspace of another size than the one that the real kernel saves."""

_LIKE_GRADIENT = {torch.ops.aten.softplus_backward.default}
_CONTIGUOUS = {torch.ops.aten.native_layer_norm_backward.default}
"""Operations whose fake kernels lay out the gradient that they return otherwise than the real ones do: as the gradient
that they are given, and contiguous. A convolution copies a gradient that isn't contiguous."""

_NORMS = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
}
"""Operations whose statistics have the data type of the parameters on the CPU, and float32 for half-precision input on
CUDA; their fake kernels on the CPU give them that of the input."""

_GROUPED = torch.ops.aten._grouped_mm.default


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Fake kernel of `_grouped_mm`, the products of routed experts; PyTorch's own takes bfloat16 only.

    Shapes: (rows, k) x (groups, k, n), (groups, m, k) x (k, columns), (m, k) x (k, n) by groups of k, or batched.
    """
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (*a.shape[:-1], b.shape[-1]) if b.dim() == 3 else (a.shape[-2], b.shape[-1])
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


@functools.cache
def _fake_kind(kind: Any) -> Any:
    """The subclass of a plain subclass of tensors whose objects are fake."""
    if issubclass(kind, FakeTensor):
        return kind
    if kind in (torch.Tensor, nn.Parameter):
        return FakeTensor
    fake: Any = type(kind.__name__, (kind, FakeTensor), {})
    if fake.__basicsize__ != FakeTensor.__basicsize__:  # it has slots, and can't be the class of a fake tensor
        return FakeTensor
    function = getattr(kind.__torch_function__, "__func__", None)
    if function is not None:
        fake.__torch_function__ = classmethod(function)  # that of a fake tensor keeps no subclass
    return fake


_plain_subclass = torch.Tensor.as_subclass


def _as_subclass(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """`tensor` as one of a subclass; PyTorch's own method can't give a fake one a second Python object."""
    if not is_fake(tensor):
        return _plain_subclass(tensor, kind)
    made = torch.ops.aten.alias.default(tensor)
    made.__class__ = _fake_kind(kind)
    return made


def _make_subclass(kind: Any, data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`data` as one of a subclass, as constructors of parameters make it."""
    if not is_fake(data) or issubclass(kind, FakeTensor):
        return make_subclass(kind, data, *args, **kwargs)
    requires_grad = args[0] if args else kwargs.get("require_grad", False)
    made = torch.ops.aten.alias.default(data.detach()).requires_grad_(requires_grad)
    made.__class__ = _fake_kind(kind)
    return made


_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_Shape = tuple[torch.Size, torch.dtype, torch.device]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Real zeros with the layout of a fake tensor."""
    flat = torch.zeros(TensorSpec.of(like).span, dtype=like.dtype, device=like.device)
    return flat.as_strided(like.shape, like.stride())


_LOG = logging.getLogger(FakeTensorMode.__module__)


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Silence PyTorch's log of failures on fake tensors."""
    return mock.patch.object(_LOG, "disabled", True)


_NO_KERNEL = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors that say that an operation has no fake kernel for any operands."""


class _Made(TorchDispatchMode):
    """Runs operations of a FakeTensorMode, which is on as well, with the results' layouts where they are known."""

    def __init__(self, mode: FakeTensorMode, layouts: Layouts) -> None:
        super().__init__()
        self._mode, self._layouts = mode, layouts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        return self._layouts.run(self._mode, func, args, kwargs or {})


class FakeWorld(TorchDispatchMode):
    """Dispatch mode, with a FakeTensorMode below it, that runs operations without memory for their floating results.

    Parameters
    ----------
    target : Target
        Where the step is to run; by default on the CPU.

    Attributes
    ----------
    fake_mode : FakeTensorMode
    number_read : float or None
        The value of any single fake number that is read; None: reading one is an error, since it may decide which
        operations run.
    answer : Answer or None
        Result of the last operation in the real run, if it was taken from there.
    runs_uncompiled : bool
        Whether compiled modules run as they are, and not as noted in a real run.
    plays_compiled : bool
        The operations that run now stand for compiled code.
    reads : int
        Number of results that were taken from the real run so far, since they depend on values.
    """

    def __init__(self, target: Target = ON_CPU) -> None:
        super().__init__()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_mode.cache_enabled = False  # it forgets which results of an operation share a storage
        self.number_read: float | None = None
        self._target = target
        self._elsewhere = WeakIdKeyDictionary()
        self._constants = Constants()
        self._outer: contextlib.ExitStack | None = None
        self._stacks = Stacks()
        answers = target.answers
        self._answers = answers if answers is not None and answers.phases else None
        self.answer: Answer | None = None
        self.plays_compiled = False
        self.runs_uncompiled = False
        self.reads = 0
        self._real_shapes: dict[Hashable, list[_Shape | None]] = {}
        self._drew = False  # a random operation has made real values here
        self._taken: Counter[Question] = Counter()  # answers taken so far
        self._begins: dict[int, Counter[Question]] = {}  # stage -> answers taken when it first began
        self._again: Counter[Question] | None = None  # the same count while a stage runs again
        self._next_stage: int | None = None
        self._training = True

    def __enter__(self) -> FakeWorld:
        self._training = torch.is_grad_enabled()
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())  # errors are raised, then answered or shown
            stack.enter_context(reading_watched(self._array, by_item=lambda: self._answers is not None or self._drew))
            stack.enter_context(mock.patch.object(torch.Tensor, "as_subclass", _as_subclass))
            stack.enter_context(mock.patch.object(torch.Tensor, "_make_subclass", staticmethod(_make_subclass)))
            stack.enter_context(self.fake_mode)
            super().__enter__()
            self._outer = stack.pop_all()
        self._stacks = Stacks()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stacks.put()  # drops modes that forward has left on top of this one
        super().__exit__(*error)
        assert self._outer is not None
        self._outer.close()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of a real tensor; the same tensor always has the same twin.

        It lies on the tensor's device if that is the CPU or the one that the step is to run on, and otherwise on the
        device that the step is traced on.
        """
        where = tensor.device.type
        if where == "cpu" or (self._target.spec is None and where != "meta"):
            made = self.fake_mode.from_tensor(tensor)
            self._constants.know(made, tensor)
            return made
        twin = self._elsewhere.get(tensor)
        if twin is None:
            device = self._target.device
            with self.fake_mode, torch.no_grad():
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, tensor.requires_grad)
            else:
                twin.requires_grad_(tensor.requires_grad)
            self._elsewhere[tensor] = twin
        return twin

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Make tensors within the block that aren't of the step: fake, of known layouts; no operation is counted."""
        with self.fake_mode, _Made(self.fake_mode, self._target.layouts):
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Operands | None = None) -> Any:
        """Run one operation: for real on integers alone, otherwise fake, or with its result in the real run.

        Parameters
        ----------
        operands : Operands, optional
            Those in `args` and `kwargs`, if they are known.

        Raises
        ------
        NeedsValues
            If its result depends on values and isn't known from a real run.
        """
        self.answer = None
        if kwargs.get("device") == _META:  # an input's, which lies there in place of the device that is planned for
            kwargs = {**kwargs, "device": self._target.device}
            operands = None
        operands = operands or Operands(args, kwargs)
        answers = self._answers
        phase = self._phase()
        if answers is None or phase not in answers.phases:
            if self._values_may_be_drawn and self._target.answers.wants(func, args):  # type: ignore[union-attr]
                raise NeedsValues(func, phase)
            result = self._with_values(func, args, kwargs, operands)
            self._drew = self._drew or Answers.wants_drawn(func, result)
            return result
        if answers.wants(func, args):
            question = Question.now(phase, func)
            self.answer = self._take(question, (args, kwargs))
            if self._drew or any(is_fake(t) for t in operands.tensors):
                answers.used.setdefault(question)
                self.reads += 1
            if self.answer.is_number:
                return self.answer.result
        result = self._with_values(func, args, kwargs, operands)
        if self.answer is None and answers.wants_drawn(func, result):
            self._drew = True
            return self._drawn(self._take(Question.now(phase, func), (args, kwargs)), result)
        return result

    @property
    def _values_may_be_drawn(self) -> bool:
        """Whether values that are read now may differ from those in the real step (NOTE [Answers], rule 3)."""
        answers = self._target.answers
        return self._drew and answers is not None and answers.has_values

    def _with_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Operands) -> Any:
        """Run one operation as `_run` does, and on known values beside it."""
        known = None
        if current_node() is None:  # nothing is read in backward
            known = self._constants.operands(func, args, kwargs, operands.tensors)
        if known is None:
            self._constants.forget_written(func, args, kwargs)
            return self._run(func, args, kwargs, operands)
        made = self._run(func, args, kwargs, operands) if not operands.tensors else None
        if made is not None and not Constants.take(made):
            return made
        with unset_fake_temporarily():
            values = func(*known[0], **known[1])
        if not any(t.is_floating_point() or t.is_complex() for t in tensors_in(values)):
            return values
        made = self._run(func, args, kwargs, operands) if made is None else made
        self._constants.note(made, values)
        return made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Operands) -> Any:
        tensors = operands.tensors
        real = [t for t in tensors if not is_fake(t)]
        on_meta = sum(t.is_meta for t in real)  # such tensors stay there, but nothing is copied from there or read
        possible = not on_meta or (on_meta == len(real) and "device" not in kwargs and not reads_values(func))
        if tensors and possible and len(real) == len(tensors) and all(map(readable, real)):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
            if all(map(readable, tensors_in(result))):
                return result
        if real:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: t if is_fake(t) else self.fake(t), (args, kwargs)
            )
            operands = Operands(args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.number_read is not None:
            return self.number_read
        if func is PACK:
            if self.answer is None:
                raise NeedsValues(func, self._phase())
            made = self.answer.made(operands.tensors)
            with unset_fake_temporarily():
                return made[0], self.answer.values[1].clone()
        try:
            if func is _GROUPED:
                result = _grouped_product(*args, **kwargs)
            else:
                result = self._target.layouts.run(self.fake_mode, func, args, kwargs, operands)
        except (CkptPlanError, NeedsValues):
            raise
        except Exception as error:
            if self.answer is None:
                raise NeedsValues(func, self._phase(), refused=not isinstance(error, _NO_KERNEL)) from error
            return self.answer.made(operands.tensors)
        if func in _MISREPORTED:
            return self._as_real(func, args, kwargs, result)
        if func in _NORMS:
            return self._with_statistics(args, result)
        if func in _LIKE_GRADIENT and result.stride() != args[0].stride():
            return torch.empty_like(args[0])
        if func in _CONTIGUOUS and result[0] is not None and not result[0].is_contiguous():
            return (torch.empty_like(result[0], memory_format=torch.contiguous_format), *result[1:])
        if not tensors and all_readable(result):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return result

    # --- answers of the real run ---

    def _phase(self) -> Phase:
        if self._again is None and current_node() is not None:
            return "backward"
        return "forward" if self._training else "inference"

    def _take(self, question: Question, operands: Any) -> Answer:
        assert self._answers is not None
        counts = self._taken if self._again is None else self._again
        answer = self._answers.take(question, counts[question], operands)
        counts[question] += 1
        return answer

    @staticmethod
    def _drawn(answer: Answer, result: Any) -> Any:
        """`result` with the values that the real run drew, in its tensors that have values."""

        def put(tensor: Any, value: Any) -> None:
            if isinstance(tensor, torch.Tensor) and not is_fake(tensor):
                tensor.copy_(value)

        with unset_fake_temporarily(), torch.no_grad():
            pytree.tree_map(put, result, answer.values)
        return result

    def _array(self, tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
        """The array that reading `tensor` returned in the real run; None for a real tensor that wasn't read there."""
        phase = self._phase()
        if self._answers is None or READ_ARRAY not in self._answers.failed or phase not in self._answers.phases:
            if is_fake(tensor) or self._values_may_be_drawn:
                raise NeedsValues(READ_ARRAY, phase)
            return None
        question = Question.now(phase, READ_ARRAY)
        if self._drew or is_fake(tensor):
            self._answers.used.setdefault(question)
            self.reads += 1
        array = self._take(question, tensor).values
        assert isinstance(array, np.ndarray)
        return array.copy()

    def stage_next(self, stage: int) -> None:
        """Note that the forward of `stage` runs next, for the first time or again."""
        self._next_stage = stage

    @contextlib.contextmanager
    def _stage(self) -> Iterator[None]:
        """Wrap a stage's own forward: if it runs again, it gets the answers of its first run."""
        stage, self._next_stage = self._next_stage, None
        if stage is None:
            yield
        elif stage not in self._begins:
            self._begins[stage] = Counter(self._taken)
            yield
        else:
            outer, self._again = self._again, Counter(self._begins[stage])
            try:
                yield
            finally:
                self._again = outer

    def runs_compiled(self, kind: str) -> None:
        """Note that compiled code of this kind runs now; subclasses that trace operations override this."""

    def name_apart(self, ratio: float) -> None:
        """Name apart what is made next in this stage, by a compiled variant; for subclasses that name storages."""

    @property
    def compiled_calls(self) -> dict[Hashable, Any]:
        """Calls of compiled modules, as noted in a real run (`note_compiled` in values/compiled.py)."""
        return {} if self._target.answers is None else self._target.answers.compiled

    @property
    def noted_ratios(self) -> Set[float]:
        """Ratios for which variants were noted (`note_at` in values/variants.py)."""
        return set() if self._target.answers is None else self._target.answers.noted_ratios

    def watching(self, modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[None]:
        """Note within the block when these stages' modules run forward; only needed where answers are taken."""
        return contextlib.nullcontext() if self._answers is None else around_forwards(modules, self._stage)

    def _as_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """`result` with the shapes of the real kernel, found by running it alone on zeros, once per kind of call.

        The workspace may depend on the operands' layout, and on whether gradients are on.
        """
        kind = (op_key(func, args, kwargs), torch.is_grad_enabled())
        if kind not in self._real_shapes:
            with unset_fake_temporarily():
                operands = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
                real = func(*operands[0], **operands[1])
                self._real_shapes[kind] = [None if t is None else (t.shape, t.dtype, t.device) for t in real]
                del operands, real
        shapes = self._real_shapes[kind]
        return type(result)(
            t
            if shape is None or t is None or (t.shape, t.dtype, t.device) == shape
            else torch.empty(shape[0], dtype=shape[1], device=shape[2])
            for t, shape in zip(result, shapes, strict=True)
        )

    def _with_statistics(self, args: tuple[Any, ...], result: Any) -> Any:
        """`result` with mean and deviation in the data type that the device gives them."""
        if args[0].device.type != "cpu":
            return result
        if self._target.is_cuda:
            dtype = torch.float64 if args[0].dtype is torch.float64 else torch.float32
        else:  # that of the parameters, which under autocast isn't the input's
            weight = next((t for t in args[1:] if isinstance(t, torch.Tensor)), None)
            if weight is None:
                return result
            dtype = weight.dtype
        others = (t if t is None or t.dtype is dtype else torch.empty_like(t, dtype=dtype) for t in result[1:])
        return (result[0], *others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd reads it several times per operation
            return args[0].fake_device if is_fake(args[0]) else func(*args)
        if any(kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the class runs it on the tensors inside, which come here
        return self.dispatched(func, args, kwargs or {})

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the step; subclasses that trace operations override this."""
        return self.run(func, args, kwargs)


@contextlib.contextmanager
def _kept_by_to() -> Iterator[None]:
    """Let `Module.to` in a forward leave a module unchanged if it changes no tensor, as with real parameters.

    PyTorch would swap fake parameters for new ones in any case, and fails where anything refers to them.
    """
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            if all(fn(tensor) is tensor for tensor in (*self.parameters(recurse), *self.buffers(recurse))):
                return self
        return original(self, fn, recurse)

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


def _dress(
    twin: torch.Tensor, module: nn.Module, name: str, world: FakeWorld
) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Give a parameter's fake twin its class and attributes, with fake twins of the tensors there.

    Those in objects, which both have, are returned as the object's attributes, the name and the real tensor.
    """
    parameter: Any = getattr(module, name)
    kind: Any = type(parameter)
    if is_fake(parameter) or not is_fake(twin):
        return []  # a wrapping class, whose own tensors are fake
    vars(twin).update(vars(parameter))
    twin.__class__ = _fake_kind(kind)
    replaced = []
    for table, key, _, tensor in attributes_beside(module, name):
        if tensor.numel() > READ_LIMIT and not is_fake(tensor):
            if table is vars(parameter):
                table = vars(twin)
            else:
                replaced.append((table, key, tensor))
            table[key] = world.fake(tensor)
    return replaced


@contextlib.contextmanager
def fake_parameters(
    model: nn.Module, world: FakeWorld, others: Iterable[Any] = (), *, accumulating: bool = False
) -> Iterator[list[Any]]:
    """Put fake twins in place of parameters, gradients and floating buffers, and undo it at the end.

    Then the model has its own objects again, and everything that forward has left in it and in `others` is gone. Random
    generators have their earlier states, so that the next forward here draws the same numbers and takes the same path.

    Compiled modules, whose code needs real memory, are replaced by calls as noted in a real run.

    With `accumulating`, every parameter has a gradient, whether or not it has one in the model.

    Yields
    ------
    list
        The random generators that the model and `others` lead to.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    twins: dict[int, torch.Tensor] = {}
    stand_ins, shards = contextlib.ExitStack(), contextlib.ExitStack()
    parallel = parallel_of(model)
    sharded = set(map(id, parallel.shards()))
    try:
        stand_ins.enter_context(compiled_as_noted(model, world))
        stand_ins.enter_context(_kept_by_to())
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    floating = tensor.is_floating_point() or tensor.is_complex()
                    if table is module._buffers and not floating and tensor.device.type != "meta":
                        continue
                    saved.append((table, name, tensor))
                    if id(tensor) in sharded:
                        continue
                    if id(tensor) not in twins:
                        twin = twins[id(tensor)] = world.fake(tensor)
                        if tensor.grad is not None and tensor.is_leaf:
                            twin.grad = world.fake(tensor.grad)
                        elif accumulating and tensor.requires_grad:
                            with world.fake_mode:
                                twin.grad = torch.empty_like(twin, requires_grad=False)
                        saved += _dress(twin, module, name, world)
                    table[name] = twins[id(tensor)]  # type: ignore[assignment]
        shards.enter_context(parallel.faked(world.fake, world.making(), accumulating=accumulating))
        with beside(model, others) as found:  # drops fake tensors that a forward leaves
            yield found.generators
    finally:
        shards.close()
        for table, name, tensor in saved:
            table[name] = tensor
        stand_ins.close()
