"""The caching-allocator model against what a GPU's allocator recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckptplan.memory.history.reader import (
    load_snapshot,
    read_history,
    replay_history,
)

RECORDED = """
    import json, os, sys
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[2]
    import torch
    from torch import nn

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
    torch.cuda.memory._dump_snapshot(sys.argv[1])
    stats = torch.cuda.memory_stats()
    print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:[64:8,256:4,>:1]"]
)
def test_replay_of_recorded_history(conf: str, tmp_path: Path) -> None:
    import json

    path = tmp_path / "snapshot.pickle"
    # In a process of its own: the history has to start before the first allocation.
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RECORDED), str(path), conf],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
    found = replay_history(read_history(load_snapshot(path)))
    assert found.recorded_peak_reserved_bytes == reserved
    assert (found.timeline.peak_reserved_bytes, found.timeline.peak_allocated_bytes) == (reserved, allocated)
    assert found.first_difference is None
