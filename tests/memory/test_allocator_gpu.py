"""The caching-allocator model against what a GPU's allocator recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from histories import Replay, history_from

RECORDED = """
    import json, os, sys
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[2]
    import torch
    from torch import nn

    torch.cuda.init()
    before = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(8),
        nn.Flatten(), nn.Linear(4096, 2048), nn.LayerNorm(2048), nn.ReLU(), nn.Linear(2048, 1000),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.cuda.Stream()
    for step, batch in enumerate((16, 24, 20, 32, 8, 32)):
        x = torch.randn(batch, 3, 96, 96, device="cuda")
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            x.sum()
            x.record_stream(side)
        loss = nn.functional.cross_entropy(model(x), torch.zeros(batch, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, loss
        if step == 3:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    after = torch.cuda.memory._snapshot()
    stats = torch.cuda.memory_stats()
    with open(sys.argv[1], "w") as file:
        json.dump([before, after, stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]], file)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:[64:8,256:4,>:1]"]
)
def test_replay_of_recorded_history(conf: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    # In a process of its own, which has the settings from the start.
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RECORDED), str(path), conf],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    before, after, allocated, reserved = json.loads(path.read_text())
    history = history_from(before, after, peak_allocated=allocated)
    assert history["devices"][0]["recorded_peak_reserved"] == reserved
    found = Replay(history)
    assert found.first_difference is None
    model = found.allocator
    assert (model.peak_reserved_bytes, model.peak_allocated_bytes) == (reserved, allocated)
