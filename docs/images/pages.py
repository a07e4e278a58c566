"""Make the reports of docs/report.md and take their pictures, wide and narrow, light and dark.

python docs/images/pages.py docs/images

GPT-2 (124 million parameters, 16 sequences of 512 tokens, AdamW, bfloat16 autocast) and a U-Net of `diffusers`, planned
for an RTX 4090; the GPT-2 with a budget that nothing fits; a chain of 1000 stages; an estimate of Llama 3 8B. Of the
GPT-2, `PARTS` are taken too, those of its memory with everything kept as well. Bytes come from traced steps and times
from the published rates of devices, so no GPU is needed. Needs Chromium; takes some four minutes.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import UNet2DModel
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import ckptplan
from ckptplan.core.profile import Profile
from ckptplan.report.page.render import Report

GPU = {"amp": "bfloat16", "optimizer": "adamw", "device": "rtx4090"}
WIDTHS = (1400, 390)
PART_WIDTH = 900
SCHEMES = ("light", "dark")
COLOURS = 256  # of a picture
PARTS = {"gpt2": {"memory": "#waterline", "trade": "#frontier"}, "kept": {"memory": "#waterline"}}
"""By report: charts with a picture of their own, and where they are on the page."""


def main(folder: Path) -> None:
    """Make all reports, and their pictures in `folder`."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for title, report in reports():
            page = Path(name) / f"{title}.html"
            report.save(page)
            print(f"{title}: {report.view.answer} {page.stat().st_size / 1024:.0f} KiB")
            for part, place in PARTS.get(title, {}).items():
                take(browser, page, PART_WIDTH, "light", folder / f"{title}-{part}.png", place)
            for width, scheme in itertools.product(WIDTHS if title != "kept" else (), SCHEMES):
                take(browser, page, width, scheme, folder / f"{title}-{width}-{scheme}.png")
        browser.close()


def reports() -> Iterator[tuple[str, Report]]:
    """The reports by name."""
    profile = gpt2()
    plans = ckptplan.frontier(profile, points=12, time_limit_s=60)
    middle_gb = (plans[0].peak_bytes + plans[-1].peak_bytes) / 2 / 2**30
    plan = ckptplan.solve(profile, middle_gb, time_limit_s=20)
    yield "gpt2", plan.report(profile, frontier=plans, commands=["python docs/images/pages.py docs/images"])
    yield "kept", ckptplan.solve(profile, plans[-1].peak_bytes / 2**30).report(profile)
    leanest = replace(plans[0], budget_bytes=int(0.9 * plans[0].peak_bytes))
    yield "infeasible", leanest.report(profile, frontier=plans)
    profile = unet()
    yield "unet", ckptplan.solve(profile, budget="40%", time_limit_s=20).report(profile, time_limit_s=40)
    n, rates = 1000, {"out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
    profile = Profile.from_chain([0.01] * n, [0.02] * n, [1 << 20] * n, [8 << 20] * n, input_bytes=1 << 20, **rates)
    yield "chain", ckptplan.solve(profile, budget="20%", time_limit_s=20).report(profile)
    yield "estimate", llama().report()


def gpt2() -> Profile:
    """The step of a GPT-2."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config()).train()
    tokens = torch.zeros(16, 512, dtype=torch.long)
    return ckptplan.profile(model, {"input_ids": tokens, "labels": tokens}, **GPU)


def unet() -> Profile:
    """The step of a U-Net for pictures of 128 by 128."""
    with torch.device("meta"):
        model = UNet2DModel(sample_size=128, block_out_channels=(128, 256, 256, 512)).train()
    inputs = (torch.zeros(16, 3, 128, 128, device="meta"), torch.zeros(16, dtype=torch.long))
    return ckptplan.profile(model, inputs, loss_fn=lambda out: out.sample.square().mean(), **GPU)


def llama() -> ckptplan.Estimate:
    """The full fine-tuning of a Llama 3 8B."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    return ckptplan.estimate(model, {"input_ids": tokens, "labels": tokens}, optimizer="adamw", device="a100-80gb")


def take(browser: Browser, page: Path, width: int, scheme: str, path: Path, place: str = "") -> None:
    """Take a picture of a page, with the pointer in the middle of the step and a stage chosen; or of one `place`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-drawn=yes]")
    if place:
        tab.locator(place).screenshot(path=path)
    else:
        if tab.locator("#strip").count():
            tab.locator("#strip button:not(.keep)").first.click()
            tab.locator("#waterline .u-over").hover()
        tab.screenshot(path=path, full_page=True)
    context.close()
    # Without k-means rare colours, such as those of a legend, become those of their neighbours.
    Image.open(path).convert("RGB").quantize(COLOURS, kmeans=2).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
