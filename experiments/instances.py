"""A fixed set of planning instances: chains of 12 to 1000 stages with menus, made from formulas, equal on each machine.

Bytes and times follow from shapes: what each operation of a block writes (2-byte numbers), its multiply-adds at a rate
that a data-centre GPU of 2020 reaches, or its bytes at such a GPU's memory bandwidth; transfers at the given link's.
They stand for no particular measurement; they make planning hard in the ways that real models do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.resident import checked_offload
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage

MATMUL_FLOP_PER_S = 150e12
MEMORY_BYTES_PER_S = 1.2e12
LINK_BYTES_PER_S = 22e9


@dataclass(frozen=True)
class Op:
    """One operation of a block: the bytes it writes, its time, and whether backward needs what it writes."""

    nbytes: int
    seconds: float
    saved: bool = True


@dataclass(frozen=True)
class Block:
    """A stage's operations; the last one writes the stage's output."""

    kind: str
    ops: tuple[Op, ...]
    parameter_bytes: int = 0


class Builder:
    """Puts blocks into a chain, each fed by the outputs of earlier ones."""

    def __init__(self, input_bytes: int, *, link_bytes_per_s: float = LINK_BYTES_PER_S) -> None:
        self.storages: list[Storage] = [Storage("input", input_bytes, -1, -1, to_end=True)]
        self.stages: list[Stage] = []
        self.parameters: list[int] = []
        self.link = Link(link_bytes_per_s, 0.95 * link_bytes_per_s, 10e-6)

    def add(self, block: Block, inputs: Sequence[int] | None = None) -> int:
        """Append `block` on the outputs `inputs` (the last one's by default); gives its output's storage."""
        i = len(self.stages)
        given = tuple(inputs) if inputs is not None else ((self.output,) if i else (0,))
        for s in given:
            self.storages[s] = replace(self.storages[s], program_until=max(self.storages[s].program_until, i))
        made = []
        for op in block.ops:
            made.append(len(self.storages))
            self.storages.append(Storage(f"{block.kind}{i}/{len(made)}", op.nbytes, i, i))
        self.output = made[-1]
        menu = _menu(block, given, made)
        linked = tuple(s for s in given if self.storages[s].born >= 0)
        seconds = sum(op.seconds for op in block.ops)
        self.stages.append(Stage(f"{block.kind}.{i}", block.kind, menu, seconds, 2 * seconds, linked=linked))
        self.parameters.append(block.parameter_bytes)
        return self.output

    def profile(self) -> Profile:
        """The chain; gradients of parameters appear from the last stage to the first."""
        held = sum(self.parameters)
        n = len(self.stages)
        gradients, backward = 0, [0] * n
        for i in reversed(range(n)):
            gradients += self.parameters[i]
            out = self.storages[self.stages[i].keep.saved[-1]].nbytes
            backward[i] = held + gradients + out
        last = self.storages[self.output]
        self.storages[self.output] = replace(last, program_until=n - 1)
        return Profile(
            tuple(self.stages), tuple(self.storages), (held,) * n, tuple(backward), held + gradients, self.link,
            resident_bytes=held,
        )  # fmt: skip


def _menu(block: Block, given: tuple[int, ...], made: list[int]) -> tuple[Option, ...]:
    ops = block.ops
    two_largest = sum(sorted((op.nbytes for op in ops), reverse=True)[:2])
    saved = tuple(s for s, op in zip(made, ops, strict=True) if op.saved or s == made[-1])
    saved_bytes = sum(op.nbytes for op in ops[:-1] if op.saved) + ops[-1].nbytes
    keep = Option("keep", (*given, *saved), (), saved_bytes + two_largest // 2, two_largest)
    seconds = sum(op.seconds for op in ops)
    recompute = Option(
        "recompute", given, (), two_largest + ops[-1].nbytes, saved_bytes + two_largest,
        recompute_s=seconds - ops[-1].seconds, recomputes=True,
    )  # fmt: skip
    menu = [
        keep, replace(keep, name="swap", moves=tuple(range(len(keep.saved)))), recompute,
        replace(recompute, name="recompute+swap", moves=tuple(range(len(given)))),
    ]  # fmt: skip
    # Save what is dearest to compute per byte first: the lower hull of bytes against time, since times add up.
    worth = sorted(
        (j for j, op in enumerate(ops[:-1]) if op.saved and op.seconds > 0),
        key=lambda j: ops[j].seconds / ops[j].nbytes,
        reverse=True,
    )
    for count in sorted({1, (len(worth) + 1) // 2, len(worth) - 1} - {0, -1, len(worth)}):
        chosen = sorted(worth[:count])
        kept_bytes = sum(ops[j].nbytes for j in chosen)
        option = Option(
            f"selective-{count}", (*(made[j] for j in chosen), *given), (), two_largest + kept_bytes + ops[-1].nbytes,
            saved_bytes - kept_bytes + two_largest,
            recompute_s=recompute.recompute_s - sum(ops[j].seconds for j in chosen), recomputes=True,
            ops=tuple(chosen),
        )  # fmt: skip
        menu += [option, replace(option, name=f"{option.name}+swap", moves=tuple(range(len(option.saved))))]
    return tuple(menu)


def _matmul(rows: int, inner: int, columns: int) -> Op:
    return Op(2 * rows * columns, 2 * rows * inner * columns / MATMUL_FLOP_PER_S)


def _pointwise(elements: int, reads: int = 1, *, saved: bool = True) -> Op:
    return Op(2 * elements, 2 * elements * (1 + reads) / MEMORY_BYTES_PER_S, saved)


def transformer_block(tokens: int, width: int, sequence: int, *, kind: str = "block", cross: int = 0) -> Block:
    """Attention with a fused kernel and a four times wider feed-forward part; `cross` tokens attended to besides."""
    attention = replace(_matmul(tokens, sequence * 2, width), nbytes=2 * tokens * width)
    ops = [
        _pointwise(tokens * width), _matmul(tokens, width, 3 * width), attention, _matmul(tokens, width, width),
        _pointwise(tokens * width, 2),
    ]  # fmt: skip
    if cross:
        memory = replace(_matmul(tokens, cross * 2, width), nbytes=2 * tokens * width)
        ops += [_matmul(tokens, width, width), _matmul(cross, width, 2 * width), memory, _matmul(tokens, width, width)]
    ops += [
        _pointwise(tokens * width), _matmul(tokens, width, 4 * width), _pointwise(4 * tokens * width),
        replace(_matmul(tokens, 4 * width, width), saved=False), _pointwise(tokens * width, 2),
    ]  # fmt: skip
    return Block(kind, tuple(ops), 2 * (12 + 4 * bool(cross)) * width * width)


def bottleneck(images: int, side: int, channels: int, *, stride: int = 1, kind: str) -> Block:
    """ResNet's: 1x1, 3x3 and 1x1 convolutions, a normalisation and an activation after each."""
    pixels, inner = images * side * side, channels // 4
    before = images * (side * stride) ** 2
    ops = [
        _matmul(before, channels // stride, inner), _pointwise(before * inner),
        _pointwise(before * inner, saved=False), _matmul(pixels, 9 * inner, inner), _pointwise(pixels * inner),
        _pointwise(pixels * inner, saved=False), _matmul(pixels, inner, channels), _pointwise(pixels * channels),
        _pointwise(pixels * channels, 2),
    ]  # fmt: skip
    return Block(kind, tuple(ops), 2 * (channels * inner * 2 + 9 * inner * inner))


def double_conv(images: int, side: int, read: int, channels: int, *, kind: str) -> Block:
    """U-Net's: two 3x3 convolutions, normalised and activated."""
    pixels = images * side * side
    ops = [
        _matmul(pixels, 9 * read, channels), _pointwise(pixels * channels), _matmul(pixels, 9 * channels, channels),
        _pointwise(pixels * channels), _pointwise(pixels * channels),
    ]  # fmt: skip
    return Block(kind, tuple(ops), 2 * 9 * channels * (read + channels))


def transformer(layers: int, *, width: int = 2048, tokens: int = 16384, link: float = LINK_BYTES_PER_S) -> Profile:
    """An embedding, equal blocks, a head with a large output."""
    chain = Builder(8 * tokens, link_bytes_per_s=link)
    chain.add(Block("embed", (_pointwise(tokens * width),), 2 * 50_000 * width))
    for _ in range(layers - 2):
        chain.add(transformer_block(tokens, width, 2048))
    chain.add(Block("head", (_matmul(tokens, width, 50_000), _pointwise(tokens * 50_000, 2)), 2 * 50_000 * width))
    return chain.profile()


def homogeneous(layers: int, *, link: float = LINK_BYTES_PER_S) -> Profile:
    """Equal transformer blocks and nothing else."""
    chain = Builder(2 * 16384 * 2048, link_bytes_per_s=link)
    for _ in range(layers):
        chain.add(transformer_block(16384, 2048, 2048))
    return chain.profile()


def heterogeneous(layers: int, *, seed: int, link: float = LINK_BYTES_PER_S) -> Profile:
    """Blocks of random widths and lengths, now and then one that reads an earlier output too."""
    rng = random.Random(seed)
    chain = Builder(2 * 8192 * 1024, link_bytes_per_s=link)
    outputs: list[int] = []
    for i in range(layers):
        tokens, width = rng.choice((2048, 4096, 8192, 16384)), rng.choice((512, 1024, 2048))
        block = transformer_block(tokens, width, rng.choice((512, 2048)), kind=f"b{i}_")
        skip = [rng.choice(outputs[max(0, i - 8) : i - 1])] if i > 2 and rng.random() < 0.15 else []
        outputs.append(chain.add(block, [outputs[-1], *skip] if outputs else None))
    return chain.profile()


def resnet(bottlenecks: Sequence[int], *, images: int = 64, link: float = LINK_BYTES_PER_S) -> Profile:
    """Four groups of bottlenecks whose maps shrink by four in area from group to group."""
    chain = Builder(2 * images * 3 * 224 * 224, link_bytes_per_s=link)
    pixels = images * 112 * 112
    chain.add(Block("stem", (_matmul(pixels, 147, 64), _pointwise(pixels * 64), _pointwise(pixels * 16)), 20_000))
    for group, count in enumerate(bottlenecks):
        side, channels = 56 >> group, 256 << group
        for i in range(count):
            stride = 2 if group and not i else 1
            kind = f"g{group}s_" if not i else f"g{group}_"
            chain.add(bottleneck(images, side, channels, stride=stride, kind=kind))
    chain.add(Block("head", (_pointwise(images * 2048), _matmul(images, 2048, 1000)), 4_000_000))
    return chain.profile()


def encoder_decoder(layers: int, *, link: float = LINK_BYTES_PER_S) -> Profile:
    """Half encoder, half decoder; each decoder block reads the encoder's last output."""
    tokens, width, half = 8192, 1024, layers // 2
    chain = Builder(2 * tokens * width, link_bytes_per_s=link)
    for _ in range(half):
        memory = chain.add(transformer_block(tokens, width, 1024, kind="enc"))
    out = 0
    for _ in range(layers - half):
        out = chain.add(transformer_block(tokens // 2, width, 512, kind="dec", cross=tokens), [out, memory])
    return chain.profile()


def unet(levels: int, per_level: int, *, images: int = 16, link: float = LINK_BYTES_PER_S) -> Profile:
    """Down and up again; each level of the way up reads the output of the same level on the way down."""
    side, channels = 256, 64
    chain = Builder(2 * images * 3 * side * side, link_bytes_per_s=link)
    skips = []
    for level in range(levels):
        for i in range(per_level):
            read = 3 if not chain.stages else channels if i else channels // 2
            out = chain.add(double_conv(images, side, read, channels, kind=f"d{level}{'' if i else 's'}_"))
        skips.append(out)
        if level < levels - 1:
            side, channels = side // 2, channels * 2
    for level in reversed(range(levels - 1)):
        side, channels = side * 2, channels // 2
        for i in range(per_level):
            block = double_conv(
                images, side, channels if i else 3 * channels, channels, kind=f"u{level}{'' if i else 's'}_"
            )
            out = chain.add(block, [out] if i else [out, skips[level]])
    return chain.profile()


INSTANCES: dict[str, Callable[[], Profile]] = {
    "homogeneous-12": lambda: homogeneous(12), "homogeneous-100": lambda: homogeneous(100, link=8e9),
    "heterogeneous-24": lambda: heterogeneous(24, seed=1),
    "heterogeneous-48": lambda: heterogeneous(48, seed=2, link=11e9),
    "heterogeneous-100": lambda: heterogeneous(100, seed=3),
    "heterogeneous-300": lambda: heterogeneous(300, seed=4, link=11e9),
    "resnet-50": lambda: resnet((3, 4, 6, 3), images=128), "resnet-152": lambda: resnet((3, 8, 36, 3), link=11e9),
    "resnet-1001": lambda: resnet((3, 110, 217, 3), images=16),
    "resnet-2000": lambda: resnet((3, 220, 440, 3), images=8), "transformer-26": lambda: transformer(26),
    "transformer-98": lambda: transformer(98, link=11e9), "transformer-1000": lambda: transformer(1000),
    "encoder-decoder-24": lambda: encoder_decoder(24), "encoder-decoder-96": lambda: encoder_decoder(96, link=11e9),
    "unet-14": lambda: unet(4, 2), "unet-45": lambda: unet(5, 5, link=11e9),
}  # fmt: skip
"""Name -> profile. Link speeds differ, since a slow link makes swapping, recompute and segments meet."""

REAL = Path(__file__).parent / "profiles"
"""Profiles of real models, which `real_profiles.py` writes."""


@cache
def instance(name: str) -> Profile:
    """The profile of that name; with "+all" behind it, weights, gradients and optimizer state may move as well."""
    name, _, offload = name.partition("+")
    if name in INSTANCES:
        return INSTANCES[name]()
    return Profile.load(REAL / f"{name}.json.gz").offloading(checked_offload(offload or "activations"))
