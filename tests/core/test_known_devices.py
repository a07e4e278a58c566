"""The devices that are known by name, and descriptions of others."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from device_examples import FORMATS, SIMPLE, example

from ckptplan.core.device import OP_CLASSES, Device, find_device, known_devices, library_workspaces
from ckptplan.core.errors import InvalidInputError

pytestmark = pytest.mark.planning


@pytest.mark.parametrize("device", known_devices().values(), ids=lambda device: device.name)
def test_every_number_of_a_known_device_has_a_source_and_is_plausible(device: Device) -> None:
    for field in fields(Device):
        if field.name in ("name", "description", "sources"):
            continue
        value = getattr(device, field.name)
        names = [field.name, *(f"{field.name}.{k}" for k in value)] if isinstance(value, dict) else [field.name]
        if field.name == "efficiency":  # each share has its own
            assert all(device.sources.get(name) for name in names[1:]), field.name
        else:
            assert device.sources.get(field.name), field.name
    assert set(OP_CLASSES) <= set(device.efficiency)
    # The driver never reports what is on the box ("40GB", 10**9 bytes each or 2**30), but never less than 88 % of it.
    boxed = int(re.search(r"(\d+)GB", device.description)[1])  # type: ignore[index]
    assert 0.88 * boxed < device.memory_bytes / 2**30 <= boxed
    rates = device.flops_per_s
    # As measured, float64 on tensor cores is faster than float32 without them, and bfloat16 than float16.
    most = 1.25 if device.name.endswith("-measured") else 1
    assert rates["float64"] <= rates["float32"] * most
    assert rates["float32"] <= rates.get("tf32", rates["float16"]) <= rates["float16"]
    assert rates.get("bfloat16", rates["float16"]) <= rates["float16"] * most
    # Every one of them computes more than it streams, and streams more than its link carries.
    assert rates["float32"] > device.bytes_per_s > 10 * device.out_bytes_per_s
    assert device.is_cuda
    assert device.usable_bytes < device.memory_bytes


def test_devices_are_found_by_name_however_it_is_written() -> None:
    assert find_device("rtx4090") is find_device("RTX 4090") is find_device("rtx-4090")
    assert find_device("A100_40GB").name == "a100-40gb"
    assert find_device(SIMPLE) is SIMPLE
    for asked, hint in (("a100", "'a100-40gb' or 'a100-80gb'?"), ("h1000", "'h100'")):
        with pytest.raises(InvalidInputError, match="not known") as error:
            find_device(asked)
        assert hint in str(error.value)
        assert "calibrate" in str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory_bytes": 0.5}, "memory_bytes"),
        ({"context_bytes": 1 << 30}, "context_bytes"),
        ({"bytes_per_s": 0}, "bytes_per_s"),
        ({"flops_per_s": {"float16": 1e12}}, "'float32'"),
        ({"efficiency": {"matmul": 1.5}}, "at most 1"),
        ({"efficiency": {"matmul.int8": 0.5}}, "'matmul.int8'"),
        ({"efficiency": {"reduction.float32": 0.5}}, "'reduction.float32'"),
        ({"compute_capability": (8,)}, "compute_capability"),
        ({"launch_s": -1}, "launch_s"),
        ({"latency_s": -1}, "latency_s"),
    ],
)
def test_impossible_numbers_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(text)):
        replace(SIMPLE, **change)


def test_the_documented_fields_of_a_device_are_those_written(tmp_path: Path) -> None:
    SIMPLE.save(tmp_path / "simple.json")
    assert find_device(tmp_path / "simple.json") == SIMPLE
    written = json.loads((tmp_path / "simple.json").read_text())
    assert written.keys() - {field.name for field in fields(Device)} == {"schema"}
    assert [name for name in OP_CLASSES if f'"{name}"' not in (Device.__doc__ or "")] == []
    assert set(json.loads(example())) <= set(written)
    assert f'`"{Device.SCHEMA}"`' in FORMATS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("capability", "version", "workspaces"),
    [
        ((8, 0), "2.9.0", (8_519_680, 1 << 20)),
        ((9, 0), "2.9.1+cu128", (32 << 20, 1 << 20)),
        ((10, 0), "2.11.0+cu130", (8_519_680, 1 << 20)),
        ((10, 0), "2.12.0", (32 << 20, 0)),
        ((11, 0), "2.13.0", (8_519_680, 0)),
    ],
)
def test_workspaces_follow_architecture_and_version(
    capability: tuple[int, int], version: str, workspaces: tuple[int, int]
) -> None:
    assert library_workspaces(capability, version) == workspaces
