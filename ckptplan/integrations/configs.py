"""Models and training settings from files that people have: Hugging Face configs, TrainingArguments, axolotl's YAML.

Models are made on `meta`, without weights, from the classes of the installed transformers. Nothing is downloaded, and
code that a config names in `auto_map` is never imported.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError

_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "adam": "adam",
    "sgd": "sgd", "adafactor": "adafactor", "adagrad": "adagrad", "rmsprop": "rmsprop",
}  # fmt: skip
_NO_BYTES = (
    "adam_", "weight_decay", "learning_rate", "lr", "warmup", "logging", "save", "eval", "report", "output", "run_name",
    "seed", "data", "dataloader", "max_steps", "num_train_epochs", "num_epochs", "hub", "push", "wandb", "val_",
    "load_best",
    "disable_tqdm", "datasets", "dataset", "chat_template", "overwrite", "do_", "metric", "greater", "resume", "debug",
    "max_grad_norm", "special_tokens", "tokenizer", "shuffle", "lora_alpha", "lora_dropout", "remove_unused",
)  # fmt: skip
"""Beginnings of the settings that change no bytes of a step."""


@dataclass(frozen=True)
class Job:
    """What is trained, as far as files and options say.

    Attributes
    ----------
    config : str
        Path of a Hugging Face config, or its folder.
    batch, length : int or None
        Samples on a device in a micro-batch, and tokens of each.
    optimizer, amp : str or None
        As in `ckptplan.core.request.Training`.
    accumulate : bool or None
        Whether steps start with gradients: with several micro-batches.
    lora : str or None
        As the option `--lora`.
    notes : tuple of str
        Settings that weren't understood, and those that plans don't follow.
    """

    config: str = ""
    batch: int | None = None
    length: int | None = None
    optimizer: str | None = None
    amp: str | None = None
    accumulate: bool | None = None
    lora: str | None = None
    notes: tuple[str, ...] = field(default=())

    def over(self, other: Job) -> Job:
        """Return a job with what this one says, and for the rest what `other` does."""
        mine = {k: v for k, v in vars(self).items() if v not in (None, "", ())}
        return replace(other, **(mine | {"notes": (*other.notes, *self.notes)}))


def read_training_arguments(path: Path) -> Job:
    """Return what a JSON file of `transformers.TrainingArguments` says of the bytes of a step.

    Raises
    ------
    InvalidInputError
        If the file can't be read.
    """
    data = _mapping(path, json.loads)
    known = {
        "per_device_train_batch_size": "batch", "max_length": "length", "max_seq_length": "length",
        "optim": "", "bf16": "", "fp16": "", "gradient_accumulation_steps": "", "gradient_checkpointing": "",
        "activation_checkpointing": "",
    }  # fmt: skip
    return _job(data, known)


def read_axolotl(path: Path) -> Job:
    """Return what an axolotl YAML file says of the bytes of a step; `base_model` must be a folder or a config here.

    Raises
    ------
    InvalidInputError
        If the file can't be read.
    """
    import yaml

    data = _mapping(path, yaml.safe_load)
    known = {
        "base_model": "config", "micro_batch_size": "batch", "sequence_len": "length", "optimizer": "", "bf16": "",
        "fp16": "", "gradient_accumulation_steps": "", "gradient_checkpointing": "", "adapter": "", "lora_r": "",
        "lora_target_modules": "", "lora_target_linear": "",
    }  # fmt: skip
    job = _job(data, known)
    if data.get("adapter") == "lora":
        targets = data.get("lora_target_modules") or ("all-linear" if data.get("lora_target_linear") else None)
        names = targets if isinstance(targets, list) else [targets] if targets else []
        job = replace(
            job, lora=",".join([f"r={data.get('lora_r') or 8}", *([f"targets={','.join(names)}"] if names else [])])
        )
    elif data.get("adapter"):
        job = replace(job, notes=(*job.notes, f"adapter: {data['adapter']} isn't planned for; counted without it"))
    config = job.config and str(path.parent / job.config if (path.parent / job.config).exists() else job.config)
    return replace(job, config=config)


def _mapping(path: Path, read: Callable[[str], Any]) -> dict[str, Any]:
    try:
        found = read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{path} can't be parsed: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path} holds a {type(found).__name__}; it must hold names and values")
    return found


def _job(data: Mapping[str, Any], known: Mapping[str, str]) -> Job:
    notes: list[str] = []
    fields: dict[str, Any] = {}
    for name, of_job in known.items():
        if of_job == "config" and data.get(name) is not None:
            fields[of_job] = str(data[name])
        elif of_job and (number := _whole(data, name, notes)) is not None:
            fields[of_job] = number
    unknown = [n for n, v in data.items() if n not in known and v not in (None, False) and not n.startswith(_NO_BYTES)]
    if unknown:
        notes.append(f"not understood, and not counted: {', '.join(sorted(unknown))}")
    optimizer = data.get("optim", data.get("optimizer"))
    if optimizer is not None:
        fields["optimizer"] = _OPTIMIZERS.get(str(optimizer))
        if fields["optimizer"] is None:
            fields["optimizer"] = "adamw"
            notes.append(
                f"optimizer {optimizer} isn't known; counted as adamw, whose state is two copies of the weights"
            )
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if data.get(name) in (True, "true", "auto"):
            fields.setdefault("amp", dtype)
    if (_whole(data, "gradient_accumulation_steps", notes) or 1) > 1:
        fields["accumulate"] = True
    if data.get("gradient_checkpointing") or data.get("activation_checkpointing"):
        notes.append("checkpointing is left to the plan, so the files' own is off")
    return Job(**fields, notes=tuple(notes))


def _whole(data: Mapping[str, Any], name: str, notes: list[str]) -> int | None:
    """Return a setting that is a whole number, or None, with a note if it is "auto"."""
    value = data.get(name)
    if value is None:
        return None
    if value == "auto":
        notes.append(f"{name} is 'auto', which isn't known here; give a number")
        return None
    if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
        raise InvalidInputError(f"{name}: {value!r} is not a whole number, 1 or more")
    return int(value)


def make_model(job: Job) -> nn.Module:
    """Return the model of a job's config on `meta`, with its adapter.

    Raises
    ------
    InvalidInputError
        If the config can't be read, or the installed transformers has no such model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not job.config:
        raise InvalidInputError("no config is named: give --config, or base_model in the axolotl file")
    path = Path(job.config)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise InvalidInputError(
            f"{path} can't be read: there is no such file; nothing is downloaded, so name a config here"
        )
    data = _mapping(path, json.loads)
    kind = str(data.get("model_type"))
    if kind not in CONFIG_MAPPING:
        own = " (the code that its auto_map names isn't imported)" if "auto_map" in data else ""
        raise InvalidInputError(
            f"{path}: transformers {transformers.__version__} has no model of type {kind!r}{own}; update transformers, "
            "or name a function that makes the model: ckptplan fit package.module:build"
        )
    data = {k: v for k, v in data.items() if k != "auto_map"}
    config = CONFIG_MAPPING[kind].from_dict(data)
    name = next(iter(data.get("architectures") or ()), None)
    made: Any = getattr(transformers, name, None) if name else None
    if made is None:
        mapping = transformers.AutoModelForCausalLM._model_mapping
        made = mapping[type(config)] if type(config) in mapping else transformers.AutoModel._model_mapping[type(config)]
    with torch.device("meta"):
        model = made._from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)
    model.train()
    return model if job.lora is None else _with_lora(model, job.lora)


def _with_lora(model: nn.Module, text: str) -> nn.Module:
    """Return the model with adapters as `r=16,targets=q_proj,v_proj` says; its own weights are frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InvalidInputError("--lora needs peft: pip install peft") from error
    options: dict[str, list[str]] = {}
    last = ""
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            last = name.strip()
            options[last] = [value.strip()]
        elif last:
            options[last].append(part.strip())
    unknown = options.keys() - {"r", "alpha", "targets"}
    if unknown or not options or not all(v[0].isdigit() for k, v in options.items() if k != "targets"):
        raise InvalidInputError(
            f"--lora {text!r} can't be read; give r=16,targets=q_proj,v_proj or r=16,targets=all-linear"
        )
    targets: Any = options.get("targets")
    if targets == ["all-linear"]:
        targets = "all-linear"
    rank = int(options.get("r", ["8"])[0])
    try:
        return get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
    except ValueError as error:
        raise InvalidInputError(f"--lora {text!r}: {error}") from error


def positions(model: nn.Module) -> int | None:
    """Return the largest length of a model's inputs by its config; None if that has none."""
    config = model.config
    config = getattr(config, "text_config", None) or config
    found = getattr(config, "n_positions", None) or getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def make_inputs(model: nn.Module, length: int | None) -> tuple[Callable[[int], dict[str, torch.Tensor]], int]:
    """Return a function from a batch size to inputs, and their length in tokens (0: images).

    Parameters
    ----------
    length : int, optional
        By default 2048, or fewer if the model has fewer positions.

    Raises
    ------
    InvalidInputError
        If the model takes neither tokens nor images, or has fewer positions.
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    names = inspect.signature(inner.forward).parameters
    most = positions(model)
    if length is not None and most is not None and length > most:
        raise InvalidInputError(
            f"the model has {most} positions, and {length} tokens are given; give --seq {most} or less"
        )
    tokens = length or min(2048, most or 2048)
    kind = type(inner).__name__
    images = getattr(inner, "main_input_name", "") == "pixel_values"
    if not images and "input_ids" not in names:
        raise InvalidInputError(
            f"inputs for {kind} don't follow from its config; name a function that makes model and inputs: "
            "ckptplan fit package.module:build"
        )
    of_samples = "SequenceClassification" in kind or "ImageClassification" in kind
    of_tokens = any(word in kind for word in ("LM", "ConditionalGeneration", "TokenClassification"))

    def make(batch: int) -> dict[str, torch.Tensor]:
        if images:
            size = getattr(inner.config, "image_size", 224)
            height, width = (size, size) if isinstance(size, int) else tuple(size)
            channels = getattr(inner.config, "num_channels", 3)
            found = {"pixel_values": torch.zeros(batch, channels, height, width, device="meta")}
        else:
            ids = torch.zeros(batch, tokens, dtype=torch.long)
            found = {name: ids for name in ("input_ids", "decoder_input_ids") if name in names}
        if "labels" in names and (of_samples or (of_tokens and not images)):
            found["labels"] = torch.zeros(batch, *([] if of_samples else [tokens]), dtype=torch.long)
        return found

    return make, 0 if images else tokens
