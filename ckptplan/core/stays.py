"""What of a step's bytes no plan can move, and what would make it smaller."""

from __future__ import annotations

from ckptplan.core.fsdp import WITH_WHOLE_GRADIENTS, is_sharding
from ckptplan.core.profile import Profile
from ckptplan.core.units import format_bytes

LEAST_SHARE = 0.25
"""Of a step's bytes; less isn't worth a word."""
_CHUNKED = (
    "the loss's: logits and copies of them. A chunked loss makes them piece by piece: TRL's SFTTrainer with "
    "loss_type='nll', Liger's LigerFusedLinearCrossEntropyLoss (use_liger_kernel=True in TrainingArguments), or "
    "torch.nn.functional.linear_cross_entropy from PyTorch 2.15"
)
_WHOLE = "its own, which it needs at once: split it into modules that are called one after the other, or the batch"
_UPDATE = (
    "the update needs weights, gradients and optimizer state at once, and temporaries of its own: fused=True has none, "
    "Adafactor and 8-bit optimizers less state"
)
_SUMS = (
    "among them the sums of gradients over micro-batches, in fp32 as the parameters are under autocast: parameters in "
    "bfloat16 have half of that, and without accumulation each gradient is made in its layer's backward"
)
_WHOLE_SUMS = (
    "among them the sums of whole gradients over micro-batches, which FSDP2 keeps in its reduce_dtype: with "
    "set_requires_gradient_sync(True) each micro-batch leaves shards alone"
)


def what_stays(profile: Profile, stage: str, phase: str, nbytes: int) -> str:
    """Return what no plan can move of a step that has `nbytes`, in a sentence; empty if that is little.

    Parameters
    ----------
    profile : Profile
    stage : str
        The step's, as of `StepNeed`; of an update any.
    phase : "forward", "backward" or "update"
    nbytes : int
    """
    k = next((k for k, each in enumerate(profile.stages) if each.name == stage), None)
    if phase == "update" or k is None or nbytes <= profile.update_peak_bytes:
        return _UPDATE
    modules = [i for i, each in enumerate(profile.stages) if not each.is_glue] or [0]
    base, added = (
        (profile.base_forward_bytes, "forward_bytes")
        if phase == "forward"
        else (profile.base_backward_bytes, "backward_bytes")
    )
    own = min(getattr(option, added) for option in profile.stages[k].options)
    of_loss = k >= modules[-1]
    if of_loss:  # the output is there until the end of the step
        own += sum(storage.nbytes for storage in profile.storages if storage.to_end)
    parts = []
    if own >= LEAST_SHARE * nbytes:
        parts.append(f"{format_bytes(own)} in {phase} of {stage!r} are {_CHUNKED if of_loss else _WHOLE}")
    if base[k] >= LEAST_SHARE * nbytes:
        parts.append(f"{format_bytes(base[k])} are weights, gradients, state and inputs that stay")
        parts += _sums_of_gradients(profile)
    return "; ".join(parts)


def _sums_of_gradients(profile: Profile) -> list[str]:
    """Return what is said of gradients of earlier micro-batches that stay, where they are wider than they need be."""
    of = profile.fingerprint
    if not of.accumulates or "gradients" in profile.offload:
        return []
    if is_sharding(of.parallel):
        return [_WHOLE_SUMS] if of.parallel.endswith(WITH_WHOLE_GRADIENTS) else []
    return [_SUMS] if of.autocast in ("bfloat16", "float16") else []
