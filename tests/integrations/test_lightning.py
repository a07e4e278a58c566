"""Lightning's Trainer with the callback against without it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from measured_step import measured
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.integrations.lightning import ActivationPlanner

STEPS = 4

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # Lightning's own, about workers, intervals of logging and pytree


def layers() -> nn.Sequential:
    blocks = [[nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)] for _ in range(2)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.BatchNorm1d(32), nn.Linear(32, 10))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rates": {(0, 1): 2.0}, "mixed": {0: 1.0, "x": 2.0}})  # which no JSON holds
        self.layers = layers()
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.batch: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        """Measure the step: what is there before it, and the most that it adds."""
        step = super().optimizer_step
        _, peak = measured(lambda: step(epoch, batch_idx, optimizer, closure), self, [optimizer.optimizer], self.batch)
        self.peaks.append(peak)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        self.log("val", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Module):
    """Each linear layer is a unit, and so are all of them."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class Scheduled(Module):
    """Steps its optimizer with a closure, and its scheduler by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()

        def closure() -> torch.Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)
        scheduler.step()
        self.log("loss", self.losses[-1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Manual(Module):
    """Two parts with an optimizer each, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = layers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        loss = F.cross_entropy(self.layers(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        other = F.cross_entropy(self.judge(x + 1), y) + F.mse_loss(self.judge(x), self.layers(x).detach())
        second.zero_grad()
        other.backward()
        second.step()
        self.log("loss", loss)
        self.losses += [float(loss), float(other)]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layers.parameters()), torch.optim.SGD(self.judge.parameters(), 0.1, momentum=0.9)


class Skipping(Module):
    """Returns more than the loss, and for some batches a loss that doesn't depend on the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 8 == 0:
            return torch.zeros((), requires_grad=True)
        hidden = self.layers(batch[0])
        return {"loss": F.cross_entropy(hidden, batch[1]), "all": hidden.repeat(1, 40), "text": "t"}


class Measured(L.Callback):
    """Measures the peak of a manual step, planning apart: added first, it runs within what the planner has replaced."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        original = trainer.strategy.training_step

        def step(*args: Any) -> Any:
            result, peak = measured(lambda: original(*args), module, trainer.optimizers, args)
            self.peaks.append(peak)
            return result

        trainer.strategy.training_step = step  # type: ignore[method-assign]


def fit(
    folder: Path, *callbacks: L.Callback, kind: type[Module] = Module, batches: list[int] | None = None, **how: Any
) -> tuple[Module, L.Trainer]:
    L.seed_everything(0, verbose=False)
    module = kind()
    data = [(torch.randn(n, 32), torch.randint(10, (n,))) for n in batches or [64] * 8]
    path = how.pop("ckpt_path", None)
    options: dict[str, Any] = {"max_steps": STEPS, "enable_checkpointing": False, "logger": False, **how}
    trainer = L.Trainer(
        accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    loader, few = (
        torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=lambda row: row) for rows in (data, data[:1])
    )
    trainer.fit(module, loader, few if kind is Module else None, ckpt_path=path)
    return module, trainer


def assert_same(a: Module, b: Module) -> None:
    assert a.losses == b.losses
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "manual": {"kind": Manual, "max_steps": 2 * STEPS},
    "scheduled": {"kind": Scheduled},
    "skipping": {"kind": Skipping},
}


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptplan")
    planner = ActivationPlanner(budget="20%", time_limit_s=0.2, check="always")
    plain, _ = fit(tmp_path, **WAYS[way])
    measured = Measured()
    manual = [measured] if issubclass(WAYS[way].get("kind", Module), (Manual, Scheduled)) else []
    planned, trainer = fit(tmp_path, *manual, planner, **WAYS[way])
    assert_same(planned, plain)
    assert planner.handle is not None
    peaks = planned.peaks[2:] + measured.peaks  # planning is in one of the first two steps
    assert peaks
    assert max(peaks) <= planner.handle.plan.budget_bytes
    stats = planner.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    assert any("of the best possible" in r.message for r in caplog.records if r.name == "ckptplan")
    assert not any("forward" in vars(m) for m in planned.modules())
    assert trainer.callback_metrics.keys() >= {"loss"} or way == "skipping"
    assert "training_step" not in {**vars(planned), **(vars(trainer.strategy) if not manual else {})}


def test_larger_batches_are_planned_for(tmp_path: Path) -> None:
    batches = [32, 16, 64, 48]
    planner = ActivationPlanner(budget_gb=0.05, time_limit_s=0.2)
    plain, _ = fit(tmp_path, batches=batches)
    planned, _ = fit(tmp_path, planner, batches=batches)
    assert_same(planned, plain)
    assert "[64, 32]" in planner.state_dict()["asked"]


def test_a_larger_batch_without_a_plan_follows_the_former_one(tmp_path: Path) -> None:
    batches = [32, 512, 32, 1024, 2048, 4096]
    plain, _ = fit(tmp_path, batches=batches, max_steps=6)
    planner = ActivationPlanner(budget_gb=plain.peaks[2] / 2**30, time_limit_s=0.2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planned, _ = fit(tmp_path, planner, batches=batches, max_steps=6)
    assert_same(planned, plain)
    found = [str(w.message) for w in said if "the former plan is followed" in str(w.message)]
    assert len(found) == 3
    assert found[-1].endswith("no more plans are tried in this training")
    with warnings.catch_warnings(record=True) as said:  # the next training tries again
        warnings.simplefilter("always")
        fit(tmp_path, planner, batches=batches[:2], max_steps=2)
    assert any(str(w.message).endswith("the former plan is followed") for w in said)


def test_a_plan_that_was_made_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two shapes has a larger dimension than the other."""

    class Shaped(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.layers(batch[0]).flatten(0, -2), batch[1])

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.turn = not getattr(self, "turn", False)
            return (batch[0] if self.turn else batch[0].reshape(2, -1, 32), batch[1])

    solved: list[Any] = []
    solve = ckptplan.solve
    monkeypatch.setattr(
        "ckptplan.integrations.training.solve", lambda *a, **k: solved.append(solve(*a, **k)) or solved[-1]
    )
    plain, _ = fit(tmp_path, kind=Shaped, max_steps=STEPS + 1)
    planner = ActivationPlanner(budget_gb=0.05, time_limit_s=0.2)
    planned, _ = fit(tmp_path, planner, kind=Shaped, max_steps=STEPS + 1)
    assert_same(planned, plain)
    assert len(solved) == 2
    saved = planner.state_dict()
    assert saved["plan"] == solved[0].to_json()
    assert "[64, 32]" in saved["asked"]


def test_the_plan_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And isn't taken for another request."""
    how: dict[str, Any] = {"budget": "20%", "time_limit_s": 0.2}
    _, trainer = fit(tmp_path, ActivationPlanner(**how), max_steps=2)
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    plain, _ = fit(tmp_path, ckpt_path=path)
    planner, other = ActivationPlanner(**how), ActivationPlanner(**how, actions=("keep", "recompute"))
    with monkeypatch.context() as patch:
        patch.setattr("ckptplan.integrations.training.solve", lambda *a, **k: pytest.fail("it has a plan"))
        planned, _ = fit(tmp_path, planner, ckpt_path=path)
    assert planner.handle is not None
    assert planner.handle.stats().forwards > 0
    assert_same(planned, plain)
    fit(tmp_path, other, ckpt_path=path)
    assert other.handle is not None
    assert not other.handle.stats().swapped_out_bytes


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError

    made: list[Module] = []

    class Noted(Module):
        def configure_optimizers(self) -> Any:
            made.append(self)
            return super().configure_optimizers()

    with pytest.raises(ValueError):  # noqa: PT011
        fit(tmp_path, ActivationPlanner(budget="20%", time_limit_s=0.2), Fails(), kind=Noted)
    assert not any("forward" in vars(m) for m in made[0].modules())


def test_strategies_without_bytes_are_refused(tmp_path: Path) -> None:
    planner = ActivationPlanner(1)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    with pytest.raises(UnsupportedModelError, match="FSDPStrategy"):
        planner.on_train_start(trainer, Module())


def test_what_no_plan_can_see_is_refused(tmp_path: Path) -> None:
    class Quasi(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    class Pulls(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    for kind, named in ((Quasi, "LBFGS"), (Pulls, "dataloader_iter")):
        with pytest.raises(UnsupportedModelError, match=named):
            fit(tmp_path, ActivationPlanner(budget="20%"), kind=kind)
