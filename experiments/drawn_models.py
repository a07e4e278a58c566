"""Models drawn by a seed from all model classes of `transformers` and `diffusers`, made small by rules on names.

No class has rules of its own. A config is shrunk by the names of its fields: widths are divided by one number, so that
their ratios stay, and layers, experts, vocabularies, positions and images are bounded. Inputs follow from the names of
the forward's parameters; where a name leaves several shapes open, each is tried. What was found is a `Recipe`, which
makes equal models as often as needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}
"""Package -> the class of which its models are subclasses."""

DRAWS = Path(__file__).with_name("drawn.json")
"""The draws of the committed results, made before anything was run on them."""

TIMES = 4
"""Factor of the samples in trainings, so that activations are more than the gradients of these small models."""

BATCH, LENGTH, TEXT_LENGTH = 2, 64, 16
VOCAB, RESERVED = 1000, 100  # tokens; the last ones are those that a config names
POSITIONS = 512
EXPERTS = 16
GROUPS = 32  # of group norms, most often a constant
SAMPLES = 16000  # of audio
MOST_PARAMETERS = 20_000_000  # of a model that is tried
MOST_TRIES = 200  # inputs for one config


class UnbuildableError(Exception):
    """No model, or no inputs for it, follow from the rules; the message has what failed first for each config."""


class TooLargeError(UnbuildableError):
    """A config has too many parameters."""


# --- the draw ---


def classes(packages: Sequence[str]) -> list[str]:
    """Qualified names of all concrete model classes that the packages export, sorted."""
    found: set[str] = set()
    for package in packages:
        module = importlib.import_module(package)
        base = getattr(module, BASES[package])
        for name in dir(module):
            try:
                kind = getattr(module, name)
            except Exception:  # it needs a library that is not here
                continue
            if inspect.isclass(kind) and issubclass(kind, base) and _is_concrete(kind):
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(found)


def _is_concrete(kind: type[nn.Module]) -> bool:
    abstract = kind.forward is nn.Module.forward or kind.__name__.endswith("PreTrainedModel")
    return not abstract and getattr(kind, "config_class", True) is not None


def draw(seed: int, count: int, packages: Sequence[str]) -> list[str]:
    """`count` of the classes, drawn by `seed`."""
    return random.Random(seed).sample(classes(packages), count)


def drawn(experiment: str) -> list[str]:
    """The committed draw of an experiment, with what was drawn for it later."""
    found = json.loads(DRAWS.read_text())[experiment]
    return [*found["names"], *found.get("further", {"names": ()})["names"]]


# --- small configs ---


@dataclass(frozen=True, slots=True)
class Shrinking:
    """How far a config is shrunk; a layer count or divisor of None leaves such fields as they are."""

    divisor: int | None
    layers: int | None
    images: bool = True

    def field(self, name: str, value: Any) -> Any:
        """The value of a config's field, shrunk by the field's name."""
        if isinstance(value, bool):
            return value and name != "use_cache"
        if isinstance(value, int):
            return self.number(name, value)
        if isinstance(value, list | tuple):
            return type(value)(self.field(name, entry) for entry in value)
        if isinstance(value, dict):
            return {key: self.field(str(key), entry) for key, entry in value.items()}
        return value

    def number(self, name: str, value: int) -> int:
        if re.search(r"(token|bos|eos|pad|start|end)_(id|index)s?$", name):
            return value if value < VOCAB - RESERVED else VOCAB - RESERVED + value % RESERVED
        if re.search(r"vocab(_size)?$|vocab_size|num_embeddings", name):
            return min(value, VOCAB)
        if re.search(r"(^|_)experts$|n_routed_experts|num_experts$", name):
            return min(value, EXPERTS)
        if re.search(r"position_embeddings|positions$|n_ctx|max_seq_len|max_sequence_length", name):
            return min(value, POSITIONS)
        if re.search(r"(image|img|input|sample|crop|train)_(size|height|width)$", name):
            return value if not self.images or value <= 64 else 64 if value % 14 else 112
        if re.search(r"(^|_)(n_?)?(layers?|depths?|blocks|layers_per_block)$|num_hidden_layers", name):
            return value if self.layers is None else min(value, self.layers)
        if self.divisor is None or value % self.divisor or value // self.divisor < 4 or not _WIDTH.search(name):
            return value
        if re.search("block_out_channels|base_channels|decoder_channels", name) and value % GROUPS == 0:
            return math.ceil(value // self.divisor / GROUPS) * GROUPS
        return value // self.divisor


_WIDTH = re.compile(
    r"^(?!.*(num_channels|mel|patch|kernel|window|pool|stride|per_tok|position|temporal|chunk|grid|type_))"
    r".*(hidden|width|(^|_)dims?($|_)|embed|d_model|d_ff|d_kv|d_inner|n_embd|intermediate|inner|ffn|rank|channels|"
    r"head_dim|section|planes|features|units|proj_size|projection_size|state_size|d_state|axes_dims|groups$)"
)

SHRINKINGS = (
    (8, 6, True), (16, 6, True), (32, 6, True), (4, 6, True), (8, 6, False), (2, 6, True), (4, None, False),
    (2, 6, False), (None, 6, True), (None, 6, False), (None, None, False),
)  # fmt: skip
"""Divisor, layers, images: from the smallest to the default config."""


def small_config(config: Any, shrinking: Shrinking) -> Any:
    """A config of `transformers` with the fields that are given, not derived from others, shrunk; its parts as well."""
    given = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if hasattr(value, "model_type") and dataclasses.is_dataclass(value):
            given[field.name] = small_config(value, shrinking)
        elif field.name == "pad_token_id" and value is None:
            given[field.name] = 0
        elif field.init and field.default is not None and not field.name.startswith("_"):
            small = shrinking.field(field.name, value)
            if small != field.default:
                given[field.name] = small
    return type(config)(**given)


def small_arguments(kind: type[nn.Module], shrinking: Shrinking) -> dict[str, Any]:
    """The arguments of a model of `diffusers`: its defaults, shrunk; what has none gets a width."""
    arguments = {}
    for name, parameter in itertools.islice(inspect.signature(kind.__init__).parameters.items(), 1, None):
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = 64 if parameter.default is parameter.empty else parameter.default
        arguments[name] = shrinking.field(name, default)
    return arguments


# --- inputs ---


class Settings:
    """The fields of a config and of the configs in it, by name; the outermost first."""

    def __init__(self, config: Any) -> None:
        self.fields: dict[str, Any] = {}
        level = [config]
        while level:
            below = []
            for part in level:
                entries = dict(part) if isinstance(part, Mapping) else dict(vars(part))
                for key in getattr(part, "attribute_map", {}):
                    entries.setdefault(key, getattr(part, key, None))
                for name, value in entries.items():
                    if hasattr(value, "model_type"):
                        below.append(value)
                    elif value is not None:
                        self.fields.setdefault(name, value)
            level = below

    def get(self, *names: str, default: int) -> int:
        """The first of the fields that is there, as one number."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def widths(self, pattern: str, *others: str) -> list[int]:
        """Distinct widths of fields whose name matches, then those of `others`."""
        found = [v for k, v in self.fields.items() if re.search(pattern, k) and type(v) is int and v > 1]
        return list(dict.fromkeys([*found, *(self.fields[k] for k in others if type(self.fields.get(k)) is int)]))


Making = Callable[[], Any]


def _normal(*shape: int) -> Making:
    return functools.partial(torch.randn, *shape)


def _whole(most: int, *shape: int) -> Making:
    return functools.partial(torch.randint, 3, max(most, 4), shape)


def _images(s: Settings) -> list[Making]:
    channels = s.get("num_channels", "in_channels", "in_chans", "image_channels", default=3)
    own = s.get("image_size", "img_size", "input_size", default=64)
    patch = s.get("patch_size", default=16)
    sizes = dict.fromkeys([own, 64, 4 * patch, 224])
    frames = s.get("num_frames", default=4)
    flat = channels * patch**2
    return [
        *(_normal(BATCH, channels, size, size) for size in sizes),
        *(_normal(BATCH, frames, channels, size, size) for size in sizes),
        _normal(BATCH, LENGTH, flat),
    ]


GRID = r"^(image_|video_)?grid_(thw|hws)$"


def _grid(s: Settings) -> list[Making]:
    return [lambda: torch.tensor([[1, 8, 8]] * 2)]


def _patches(s: Settings) -> list[Making]:
    channels = s.get("in_channels", "num_channels", "in_chans", default=3)
    time, patch = s.get("temporal_patch_size", default=1), s.get("patch_size", default=14)
    rows = 2 * 64
    return [_normal(rows, channels * time * patch**2), _normal(rows, channels, patch, patch)]


def _audio(s: Settings) -> list[Making]:
    mel = s.get("num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", "spectrogram_bins", default=80)
    long = s.get("max_length", default=128)
    return [
        _normal(BATCH, SAMPLES), _normal(BATCH, 1, SAMPLES), _normal(BATCH, long, mel),
        _normal(BATCH, 2 * LENGTH, mel), _normal(BATCH, mel, 2 * LENGTH),
    ]  # fmt: skip


def _features(s: Settings) -> list[Making]:
    mel = s.get("num_mel_bins", "feature_size", "n_mels", "input_dim", "input_feat_size", default=80)
    widths = dict.fromkeys([mel, *s.widths("feature_projection_input_dim|input_feat|conv_hidden|model_in_dim"), 80])
    frames = [2 * s.get("max_source_positions", default=LENGTH), 2 * LENGTH]
    return [
        making
        for width in widths
        for long in dict.fromkeys(frames)
        for making in (_normal(BATCH, width, long), _normal(BATCH, long, width))
    ] + [_normal(BATCH, 1, SAMPLES), _normal(BATCH, SAMPLES)]


def _hidden(s: Settings) -> list[Making]:
    widths = dict.fromkeys([*s.widths("^(hidden_size|d_model|hidden_dim|embed_dim)$"), *s.widths("hidden_size$")])
    return [_normal(BATCH, LENGTH, width) for width in widths]


def _samples(s: Settings) -> list[Making]:
    counts = s.widths("in_channels$|in_chans$|input_dim$|^latent_channels$|^hidden_size$|^num_channels$") or [4]
    size = min(s.get("sample_size", "sample_height", default=16), 32)
    return [
        making
        for count in counts[:3]
        for making in (
            _normal(2, count, size, size),
            _normal(2, LENGTH, count),
            _normal(2, count, 5, size, size),
            _normal(2, count, 4, size, size),
            _normal(2, count, 256),
            _normal(2, 4, count, size, size),
        )
    ]


def _contexts(s: Settings) -> list[Making]:
    widths = s.widths(
        "cross_attention_dim|joint_attention_dim|text_embed|text_dim|text_hidden|caption_channels|context_dim|"
        "cap_feat|text_in|txt_in|encoder_hidden|condition|embedding_dim$",
        "hidden_size",
    )
    return [_normal(2, TEXT_LENGTH, width) for width in [*widths, 64][:5]]


def _pooled(s: Settings) -> list[Making]:
    widths = [*s.widths("pooled_projection|pooled|embed.*input_dim|text_embed"), *s.widths("_dim$")]
    return [_normal(2, width) for width in [*widths, 64][:5]]


def _codes(s: Settings) -> list[Making]:
    books = s.get("num_codebooks", "n_codes_total", "num_quantizers", default=8)
    return [_whole(_ids(s), *shape) for shape in ((BATCH, LENGTH), (BATCH, books, LENGTH), (BATCH, LENGTH, books))]


def _conditions(s: Settings) -> list[Making]:
    images = [_normal(2, s.get("conditioning_channels", default=3), 8 * n, 8 * n) for n in (16, 32, 8, 64)]
    return [*images, _normal(2, s.get("conditioning_channels", default=4), 4, 16, 16)]


TIMESTEPS: list[Making] = [
    functools.partial(torch.randint, 0, 999, (2,)), functools.partial(torch.rand, 2), lambda: torch.tensor(10),
    functools.partial(torch.rand, 2, 5),
]  # fmt: skip
MAKINGS: tuple[tuple[str, Callable[[Settings], list[Making]]], ...] = (
    (r"^(decoder_)?input_ids$|^(input|decoder|text|question|audio)_(ids|codes|tokens)$|^tokens$|^concept_ids$", _codes),
    (r"^bbox$", lambda s: [lambda: torch.tensor([10, 20, 30, 40]).expand(BATCH, LENGTH, 4).clone()]),
    (GRID, _grid),
    (r"^(pixel_values_videos|pixel_values|images?|pixel_values_images|reference_image)$", _images),
    (r"^(pixel_values_flat|patches|flattened_patches)$", _patches),
    (r"^(input_values|audio_values|waveform|audio)$", _audio),
    (r"^(input_features|spectrogram|input_audio_features|mel_spectrogram)$", _features),
    (r"^(inputs_embeds|encoder_outputs|embeddings|image_embeds)$", _hidden),
    (r"^(sample|hidden_states|x|latents|noisy_latents|z|hidden_state)$", lambda s: [*_samples(s), *_hidden(s)]),
    (r"^(timesteps?|t|sigma|noise_level)$", lambda s: TIMESTEPS),
    (r"^(encoder_hidden_states.*|.*text_states|prompt_embeds?|cap_feats|context|text_embeds?)$", _contexts),
    (r"pooled|proj_embedding|clip_text|^y$", _pooled),
    (r"^(encoder|prompt|text|txt).*(attention_)?mask", lambda s: [functools.partial(torch.ones, 2, TEXT_LENGTH)]),
    (r"^(decoder_)?attention_mask$|padding_mask$", lambda s: [lambda: torch.ones(BATCH, LENGTH).long()]),
    (r"^img_ids$", lambda s: [lambda: torch.rand(LENGTH, s_axes(s))]),
    (r"^txt_ids$", lambda s: [lambda: torch.rand(TEXT_LENGTH, s_axes(s))]),
    (r"guidance", lambda s: [functools.partial(torch.ones, 2)]),
    (r"^(num_frames|frames)$", lambda s: [lambda: 5]),
    (r"^(height|width)$", lambda s: [lambda: 8]),
    (r"class_labels?$|^labels$", lambda s: [functools.partial(torch.randint, 0, 2, (2,))]),
    (r"^added_cond_kwargs$", lambda s: [dict]),
    (r"^img_shapes$", lambda s: [lambda: [[(1, 8, 8)]] * 2]),
    (r"^txt_seq_lens$", lambda s: [lambda: [TEXT_LENGTH] * 2]),
    (r"controlnet_cond|conditioning_image|^control", _conditions),
    (r"past_values$", lambda s: [_normal(*_series_shape(s))]),
    (r"past_observed_mask$", lambda s: [functools.partial(torch.ones, *_series_shape(s))]),
    (r"past_time_features$", lambda s: [_normal(*_series_shape(s)[:2], s.get("num_time_features", default=1) or 1)]),
)
"""Pattern of a parameter's name -> what may be passed for it, the likeliest first."""


_PATCHED = ((r"^(pixel_values|hidden_states|x|hidden_state|pixel_values_videos)$", _patches),)
"""Where there is a grid, images are given as patches."""


def s_axes(s: Settings) -> int:
    """Number of axes of rotary positions."""
    axes = next((v for k, v in s.fields.items() if re.search("axes_dim|axes_lens", k)), (0, 0, 0))
    return len(axes)


def _ids(s: Settings) -> int:
    return max(4, s.get("vocab_size", "text_vocab_size", "codebook_size", default=VOCAB) - RESERVED)


def _series_shape(s: Settings) -> tuple[int, ...]:
    lags = s.fields.get("lags_sequence") or [0]
    long = s.get("context_length", "seq_length", default=64) + max(lags, default=0)
    channels = s.get("num_input_channels", "input_size", default=1)
    return (BATCH, long, channels) if channels > 1 or "num_input_channels" in s.fields else (BATCH, long)


Inputs = dict[str, Any]


def _main_names(kind: type[nn.Module], known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The parameters that a forward needs, and further ones that make its step larger, the most first."""
    parameters = dict(itertools.islice(inspect.signature(kind.forward).parameters.items(), 1, None))
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    unknown = [name for name in needed if name not in known]
    if unknown:
        raise UnbuildableError(f"no rule for the inputs {', '.join(unknown)}")
    main = getattr(kind, "main_input_name", None)
    mains = [main] if isinstance(main, str) else [*(main or [])]
    firsts = [name for name in mains if name in parameters and name in known]
    texts = [name for name in ("input_ids", "decoder_input_ids", "bbox") if name in parameters]
    sights = [
        name for name in parameters if re.search(r"^(pixel_values|input_features|input_values|past_values)$", name)
    ]
    everything = [] if hasattr(kind, "config_class") else [name for name in parameters if name in known]
    more = [everything, [*firsts, *texts, *sights], [*firsts, *texts], [*firsts, *sights], firsts, sights[:1], texts]
    return needed, [list(dict.fromkeys(names)) for names in more]


def inputs_for(kind: type[nn.Module], config: Any) -> Iterator[dict[str, Making]]:
    """What may be passed to a forward, the likeliest first."""
    settings = Settings(config)
    parameters = inspect.signature(kind.forward).parameters
    makings = (*_PATCHED, *MAKINGS) if any(re.search(GRID, name) for name in parameters) else MAKINGS
    known = {
        name: making(settings)
        for name in parameters
        for making in [next((m for pattern, m in makings if re.search(pattern, name)), None)]
        if making is not None
    }
    needed, more = _main_names(kind, known)
    tried: list[set[str]] = []
    for further in more:
        names = [*dict.fromkeys([*needed, *further])]
        if not names or set(names) in tried or any(name not in known for name in names):
            continue
        tried.append(set(names))
        choices = sorted(itertools.product(*(range(len(known[n])) for n in names)), key=lambda c: (sum(c), c))
        for choice in choices[: MOST_TRIES // 2]:
            yield {name: known[name][k] for name, k in zip(names, choice, strict=True)}


# --- models ---


def loss_of(output: Any) -> Tensor:
    """The mean squares of all floating tensors of the output that require a gradient, added."""
    return torch.stack([t.float().pow(2).mean() for t in _tensors(output)]).sum()


def repeated(inputs: Inputs, times: int) -> Inputs:
    """The inputs with as many times their samples."""
    return {k: v.repeat(times, *[1] * (v.dim() - 1)) if isinstance(v, Tensor) and v.dim() else v
            for k, v in inputs.items()}  # fmt: skip


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad and output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(output):
        yield from _tensors(list(vars(output).values()))
    elif type(output).__name__ == "DiagonalGaussianDistribution":
        yield from _tensors(output.parameters)


@dataclass(frozen=True)
class Recipe:
    """How a model and its inputs are made: the same ones each time.

    Attributes
    ----------
    name : str
        The class.
    shrinking : Shrinking
        How small the config is.
    making : callable
        Makes the model.
    inputs : mapping
        Makes each input.
    parameters : int
    """

    name: str
    shrinking: Shrinking
    making: Callable[[], nn.Module]
    inputs: Mapping[str, Making]

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model, in training mode, with random weights, and keyword inputs."""
        torch.manual_seed(0)
        model = self.making().train()
        return model, {name: make() for name, make in self.inputs.items()}


def build(name: str, *, layers: int = 6) -> Recipe:
    """Find a small model of a class and inputs with which a step runs.

    Raises
    ------
    UnbuildableError
        If none is found.
    """
    module, _, attribute = name.rpartition(".")
    kind = getattr(importlib.import_module(module), attribute)
    problems: list[str] = []
    for divisor, depth, images in SHRINKINGS:
        shrinking = Shrinking(divisor, depth and layers, images)
        try:
            return _tried(name, kind, shrinking)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            if isinstance(error, TooLargeError) and (divisor or 1) < SHRINKINGS[0][0]:
                break  # those that follow are larger
    raise UnbuildableError("; ".join(dict.fromkeys(problems))[:400])


def _tried(name: str, kind: type[nn.Module], shrinking: Shrinking) -> Recipe:
    with _quiet():
        config: Any
        if hasattr(kind, "config_class"):
            config = small_config(kind.config_class(), shrinking)
            making = functools.partial(kind, config)
        else:
            config = small_arguments(kind, shrinking)
            making = functools.partial(kind, **config)
        _bound(making, shrinking)
        torch.manual_seed(0)
        model = making().train()
        problem: Exception | None = None
        for tries, inputs in enumerate(inputs_for(kind, config)):
            if tries == MOST_TRIES:
                break
            try:
                loss_of(model(**{key: make() for key, make in inputs.items()})).backward()
            except Exception as error:
                problem = problem or error  # the likeliest inputs say most
            else:
                return Recipe(name, shrinking, making, inputs)
        raise problem or UnbuildableError("no rule for any input")


def _bound(making: Callable[[], nn.Module], shrinking: Shrinking) -> None:
    """Refuse a model of too many parameters, without making them where that is possible."""
    try:
        with torch.device("meta"):
            model = making()
    except Exception:
        if shrinking.divisor is None:
            raise
        return
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise TooLargeError(f"{count / 1e6:.0f} million parameters are more than {MOST_PARAMETERS / 1e6:.0f}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
