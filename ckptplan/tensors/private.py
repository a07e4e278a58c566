"""Private names of PyTorch: those that several files use are imported from here, those of one file are looked up here.

All were seen in PyTorch 2.9 to 2.15. Some are called only in the middle of a training step, so a version of PyTorch
that has lost one is refused when this module is imported.
"""

from __future__ import annotations

import pkgutil
from typing import Any, TypeGuard

import torch

from ckptplan.core.errors import CkptPlanError

SUPPORTED = "2.9 to 2.15"
"""The versions of PyTorch in which these names were seen."""

OF_ONE_FILE = (
    "UntypedStorage._new_with_weak_ptr",
    "_C.DispatchKey.ADInplaceOrView",
    "_C.DispatchKey.AutocastCPU",
    "_C.DispatchKeySet",
    "_C.StorageBase.resize_",
    "_C.TensorBase.numpy",
    "_C._DisableTorchDispatch",
    "_C._ExcludeDispatchKeyGuard",
    "_C._SetExcludeDispatchKeyGuard",
    "_C._autocast_supported_devices",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._autograd._pop_saved_tensors_default_hooks",
    "_C._autograd._push_saved_tensors_default_hooks",
    "_C._autograd._saved_tensors_hooks_disable",
    "_C._autograd._saved_tensors_hooks_enable",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "_C._autograd._saved_tensors_hooks_is_enabled",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dynamo.eval_frame.get_eval_frame_callback",
    "_C._dynamo.eval_frame.set_eval_frame",
    "_C._get_deterministic_algorithms",
    "_C._get_deterministic_algorithms_warn_only",
    "_C._get_float32_matmul_precision",
    "_C._get_fp32_precision_getter",
    "_C._get_warnAlways",
    "_C._is_fwd_grad_enabled",
    "_C._is_multithreading_enabled",
    "_C._is_view_replay_enabled",
    "_C._pop_torch_dispatch_stack",
    "_C._pop_torch_function_stack",
    "_C._profiler.RecordScope",
    "_C._profiler._EventType",
    "_C._push_on_torch_dispatch_stack",
    "_C._push_on_torch_function_stack",
    "_C._set_deterministic_algorithms",
    "_C._set_float32_matmul_precision",
    "_C._set_fp32_precision_setter",
    "_C._set_fwd_grad_enabled",
    "_C._set_grad_enabled",
    "_C._set_multithreading_enabled",
    "_C._set_throw_on_mutable_data_ptr",
    "_C._set_view_replay_enabled",
    "_C._set_warnAlways",
    "_C._set_warn_deprecated_on_mutable_data_ptr",
    "_C.is_anomaly_check_nan_enabled",
    "_C.is_anomaly_enabled",
    "_C.set_anomaly_enabled",
    "_GLOBAL_DEVICE_CONTEXT",
    "_conj",
    "_debug_has_internal_overlap",
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "_fused_sdp_choice",
    "_subclasses.fake_tensor.DataDependentOutputException",
    "_subclasses.fake_tensor.DynamicOutputShapeException",
    "_subclasses.fake_tensor.UnsupportedOperatorException",
    "_subclasses.fake_tensor.unset_fake_temporarily",
    "_subclasses.functional_tensor.FunctionalTensor",
    "autograd._unsafe_preserve_version_counter",
    "autograd.graph._engine_run_backward",
    "nn.modules.module._has_any_global_hook",
    "utils._device",
    "utils._python_dispatch",
    "utils._python_dispatch.is_traceable_wrapper_subclass_type",
)
"""Names below `torch` that are looked up where they are used."""

try:
    from torch import _neg_view as neg_view
    from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
    from torch._C import _current_autograd_node as current_node
    from torch._C import _current_graph_task_id as current_graph_task
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
    from torch._C import _len_torch_function_stack as function_modes
    from torch._C import _storage_Use_Count as storage_use_count
    from torch._C._autograd import _get_sequence_nr as next_sequence_number  # type: ignore[attr-defined]
    from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks  # type: ignore[attr-defined]
    from torch._C._functorch import peek_interpreter_stack as transform
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

    make_subclass = torch.Tensor._make_subclass

    for _name in OF_ONE_FILE:
        pkgutil.resolve_name(f"torch.{_name}")
except (ImportError, AttributeError) as error:
    raise CkptPlanError(
        f"PyTorch {torch.__version__} lacks a private name that ckptplan needs ({error}); supported are PyTorch "
        f"{SUPPORTED}: install one of these, or a newer version of this package"
    ) from error

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "current_graph_task",
    "current_node",
    "disable_current_modes",
    "dispatch_modes",
    "function_modes",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "make_subclass",
    "neg_view",
    "next_sequence_number",
    "no_dispatch",
    "saved_tensors_hooks",
    "storage_use_count",
    "transform",
]


def is_fake(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)
