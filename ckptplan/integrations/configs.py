"""Models and training settings from files: Hugging Face configs, TrainingArguments, axolotl's YAML.

Models are made on `meta`, without weights, from the classes of the installed transformers. Nothing is downloaded, and
code that a config names in `auto_map` is never imported.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.fsdp import FSDP
from ckptplan.core.request import Training
from ckptplan.integrations import quantized
from ckptplan.profiling.workload.optimizer_names import check_name

_NO_BYTES = (
    "adam_", "weight_decay", "learning_rate", "lr", "warmup", "logging", "save", "eval", "report", "output", "run_name",
    "seed", "data", "dataloader", "max_steps", "num_train_epochs", "num_epochs", "hub", "push", "wandb", "val_",
    "load_best", "disable_tqdm", "chat_template", "overwrite", "do_", "metric", "greater", "resume", "debug",
    "max_grad_norm", "special_tokens", "tokenizer", "shuffle", "lora_alpha", "remove_unused", "flash_attention",
    "sdp_attention",
)  # fmt: skip
"""Prefixes of the names of settings that change no bytes of a step."""


DTYPES = ("float32", "bfloat16", "float16")
"""Types of weights, as `--dtype`."""


@dataclass(frozen=True)
class ConfiguredTraining:
    """The training that files and options describe; None stands for what they leave out.

    Attributes
    ----------
    config : str
        Path of a Hugging Face config, or its folder.
    batch, length : int or None
        Samples on a device in a micro-batch, and tokens of each.
    optimizer, amp : str or None
        As in `ckptplan.core.request.Training`; no optimizer: the one that Trainer takes where none is named.
    accumulate : bool or None
        Whether steps start with gradients: with several micro-batches.
    lora : str or None
        As the option `--lora`.
    dtype : str or None
        Type of the weights, of `DTYPES`; None: that of the config, otherwise float32, as `from_pretrained` takes it.
    float32 : tuple of str
        Parts of names of modules whose weights are in float32 nevertheless.
    fsdp : FSDP or None
        How the model is sharded.
    trainer : bool
        Whether transformers' Trainer trains, by a file for it.
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
    dtype: str | None = None
    float32: tuple[str, ...] = ()
    fsdp: FSDP | None = None
    trainer: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype {self.dtype!r} isn't a type of weights; choose from {', '.join(DTYPES)}")

    def over(self, other: ConfiguredTraining) -> ConfiguredTraining:
        """Return a job with this one's settings, and with `other`'s where this one has none."""
        mine = {k: v for k, v in vars(self).items() if v not in (None, "", (), False)}
        return replace(other, **(mine | {"notes": (*other.notes, *self.notes)}))

    def as_trained(self) -> ConfiguredTraining:
        """Return the job with unset settings filled in as transformers' Trainer and accelerate do.

        Under FSDP2 and mixed precision accelerate gathers and reduces in its type (`FullyShardedDataParallelPlugin`).
        """
        from transformers import TrainingArguments

        job = self if self.optimizer else replace(self, optimizer=str(TrainingArguments.default_optim))
        if job.trainer and job.fsdp is not None and job.amp and job.fsdp.param_dtype is None:
            job = replace(job, fsdp=replace(job.fsdp, param_dtype=job.amp, reduce_dtype=job.amp))
        return job

    @property
    def training(self) -> Training:
        """The job's training step, without its inputs."""
        return Training(optimizer=self.optimizer, amp=self.amp, accumulate=self.accumulate, fsdp=self.fsdp)


def read_training_arguments(path: Path) -> ConfiguredTraining:
    """Return the settings in a JSON file of `transformers.TrainingArguments` that change the bytes of a step.

    Raises
    ------
    InvalidInputError
        If the file can't be read, or its optimizer isn't counted.
    """
    data = {"per_device_train_batch_size": 8} | _mapping(path, json.loads)
    known = {
        "per_device_train_batch_size": "batch", "max_length": "length", "max_seq_length": "length",
        "optim": "", "bf16": "", "fp16": "", "gradient_accumulation_steps": "", "gradient_checkpointing": "",
        "activation_checkpointing": "", "fsdp": "", "fsdp_config": "",
    }  # fmt: skip
    return _job(data, known)


def read_axolotl(path: Path) -> ConfiguredTraining:
    """Return the settings in an axolotl YAML file that change the bytes of a step; `base_model` must be a local path.

    Weights are in the type of its mixed precision. Without an adapter, FSDP or an attention that needs 16 bits it
    raises embeddings, head and norms to float32 (`src/axolotl/loaders/model.py`, 0.13).

    Raises
    ------
    InvalidInputError
        If the file can't be read, or its adapter or optimizer isn't counted.
    """
    import yaml

    data = {"bf16": "auto", "micro_batch_size": 1, "sequence_len": 512} | _mapping(path, yaml.safe_load)
    known = {
        "base_model": "config", "micro_batch_size": "batch", "sequence_len": "length", "optimizer": "", "bf16": "",
        "fp16": "", "gradient_accumulation_steps": "", "gradient_checkpointing": "", "adapter": "", "lora_r": "",
        "lora_target_modules": "", "lora_target_linear": "", "lora_dropout": "", "load_in_4bit": "",
        "load_in_8bit": "", "bfloat16": "", "float16": "", "fsdp": "", "fsdp_config": "",
    }  # fmt: skip
    job = _job(data, known)
    sixteen = data.get("fp16") or data.get("float16") or data.get("load_in_8bit")
    dtype = "bfloat16" if data["bf16"] or data.get("bfloat16") else "float16" if sixteen else "float32"
    lora = _axolotl_adapter(data)
    needs_16 = ("flash_attention", "flex_attention", "cut_cross_entropy", "fsdp", "fsdp_config")
    raised = lora is None and not any(data.get(name) for name in needs_16)
    config = job.config and str(path.parent / job.config if (path.parent / job.config).exists() else job.config)
    return replace(
        job,
        config=config,
        dtype=dtype,
        lora=lora,
        float32=("norm", "embed_tokens", "lm_head") if raised and dtype != "float32" else (),
    )


def _axolotl_adapter(data: Mapping[str, Any]) -> str | None:
    """Return an axolotl file's adapter in the form of `--lora`."""
    adapter = data.get("adapter")
    bits = 4 if data.get("load_in_4bit") or adapter == "qlora" else 8 if data.get("load_in_8bit") else None
    if adapter is None and bits is None:
        return None
    if adapter not in ("lora", "qlora"):
        raise InvalidInputError(
            f"adapter: {adapter!r} isn't counted{' with quantized weights' if adapter is None else ''}; lora and qlora "
            "are; name a function that makes the model for another: ckptplan fit package.module:build"
        )
    parts = [f"r={data.get('lora_r') or 8}"]
    targets = data.get("lora_target_modules")
    if data.get("lora_target_linear"):
        targets = ["all-linear"]
    parts += [f"targets={','.join(targets) if isinstance(targets, list) else targets}"] if targets else []
    parts += [f"dropout={data['lora_dropout']}"] if data.get("lora_dropout") else []
    parts += [f"bits={bits}", "upcast=no"] if bits else []
    return ",".join(parts)


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


def _job(data: Mapping[str, Any], known: Mapping[str, str]) -> ConfiguredTraining:
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
    if (optimizer := data.get("optim") or data.get("optimizer")) is not None:
        fields["optimizer"] = check_name(str(optimizer))
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")):
        if data.get(name) in (True, "true", "auto"):
            fields.setdefault("amp", dtype)
    if (_whole(data, "gradient_accumulation_steps", notes) or 1) > 1:
        fields["accumulate"] = True
    if data.get("gradient_checkpointing") or data.get("activation_checkpointing"):
        notes.append("checkpointing is left to the plan, so the files' own is off")
    if data.get("fsdp") or ("base_model" in data and data.get("fsdp_config")):
        notes.append("the number of ranks isn't in the file: give it, --fsdp 8")
    return ConfiguredTraining(**fields, trainer=True, notes=tuple(notes))


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


def make_model(job: ConfiguredTraining) -> nn.Module:
    """Return the model of a job's config on `meta`, with its adapter.

    Under FSDP2 and mixed precision trained weights are in float32, as accelerate's `fsdp2_prepare_model` casts them,
    unless others have 4 bits.

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
    dtype = getattr(torch, job.dtype) if job.dtype else getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = made._from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        if any(part in name for part in job.float32):
            module.to(torch.float32)
    model.train()
    model = model if job.lora is None else _with_lora(model, job.lora)
    if job.trainer and job.fsdp is not None and job.amp and not quantized.has_4_bits(model):
        for p in model.parameters():
            p.data = p.data.to(torch.float32 if p.requires_grad else p.dtype)
    return model


_LORA_KEYS: dict[str, Callable[[str], bool]] = {
    "r": str.isdecimal, "alpha": str.isdecimal, "targets": bool, "bits": ("4", "8").__contains__,
    "dropout": lambda text: text.replace(".", "", 1).isdecimal(), "upcast": ("yes", "no").__contains__,
}  # fmt: skip


def _lora_options(text: str) -> dict[str, list[str]]:
    """Return the settings in `r=16,targets=q_proj,v_proj,bits=4`, each with its values."""
    options: dict[str, list[str]] = {}
    last = ""
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            last = name.strip()
            options[last] = [value.strip()]
        elif last:
            options[last].append(part.strip())
    valid = (
        k in _LORA_KEYS and all(map(_LORA_KEYS[k], v)) and (k == "targets" or len(v) == 1) for k, v in options.items()
    )
    if not options or not all(valid):
        raise InvalidInputError(
            f"--lora {text!r} can't be read; give r=16,targets=q_proj,v_proj or r=16,targets=all-linear, and also "
            "dropout=0.05, bits=4 or bits=8 (quantized weights), upcast=no (the other weights stay in their type)"
        )
    return options


def _with_lora(model: nn.Module, text: str) -> nn.Module:
    """Return the model with adapters as `_lora_options` reads them; its own weights are frozen.

    With quantized weights the others are in float32, as `peft.prepare_model_for_kbit_training` leaves them.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InvalidInputError("--lora needs peft: pip install peft") from error
    options = {"r": ["8"], "dropout": ["0"], "bits": ["16"], "upcast": ["yes"]} | _lora_options(text)
    bits = int(options["bits"][0])
    targets: Any = options.get("targets")
    if targets == ["all-linear"]:
        targets = "all-linear"
    adapter = LoraConfig(r=int(options["r"][0]), lora_dropout=float(options["dropout"][0]), target_modules=targets)
    if bits < 16:
        quantized.quantize(model, bits)
        adapter._register_custom_module({quantized.QuantizedLinear: quantized.lora_layer(bits)})
        if options["upcast"] == ["yes"]:
            quantized.raise_others(model)
    try:
        return get_peft_model(model, adapter)
    except ValueError as error:
        raise InvalidInputError(f"--lora {text!r}: {error}") from error


def described(model: nn.Module) -> str:
    """Return a model's class, its parameters by type, and how many are trained."""
    quantized_ones = {id(m.weight): m for m in model.modules() if isinstance(m, quantized.QuantizedLinear)}
    sizes: Counter[str] = Counter()
    for p in model.parameters():
        layer = quantized_ones.get(id(p))
        if layer is None:
            sizes[str(p.dtype).removeprefix("torch.")] += p.numel()
        else:
            sizes[f"{layer.bits} bits"] += layer.in_features * layer.out_features
    types = " and ".join(f"{count / 1e6:,.1f} M in {name}" for name, count in sizes.most_common())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = f"{sum(sizes.values()) / 1e6:,.1f} M parameters ({types})"
    return f"{type(model).__name__}, {total}, {trained / 1e6:,.1f} M trained"


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
