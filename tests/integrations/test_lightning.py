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
from ckptplan.core.errors import InfeasibleBudgetError, UnsupportedModelError
from ckptplan.integrations.lightning import ActivationPlanner

STEPS = 4
GIB = 2**30

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # Lightning's own, about workers, intervals of logging and pytree


def layers() -> nn.Sequential:
    block = nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)
    return nn.Sequential(*block, nn.BatchNorm1d(32), nn.Linear(32, 10))


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


class Manual(Module):
    """Two parts with an optimizer each, as a GAN has them; the first steps with a closure, and has a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        (first, second), scheduler = self.optimizers(), self.lr_schedulers()

        def closure() -> torch.Tensor:
            loss = F.cross_entropy(self.layers(x), y)
            first.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        first.step(closure=closure)
        scheduler.step()
        other = F.cross_entropy(self.judge(x + 1), y) + F.mse_loss(self.judge(x), self.layers(x).detach())
        second.zero_grad()
        other.backward()
        second.step()
        self.log("loss", self.losses[-1])
        self.losses.append(float(other))

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)
        second = torch.optim.SGD(self.judge.parameters(), 0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


class Skipping(Module):
    """Returns more than the loss, and for some batches a loss that doesn't depend on the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 8 == 0:
            return torch.zeros((), requires_grad=True)
        hidden = self.layers(batch[0])
        loss = F.cross_entropy(hidden, batch[1])
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "all": hidden.repeat(1, 40), "text": "t"}


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
    trainer.fit(module, loader, few if kind in (Module, Skipping) else None, ckpt_path=path)
    return module, trainer


def assert_same(a: Module, b: Module) -> None:
    assert a.losses == b.losses
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def planner_for(plain: Module, bucket_bytes: int = 0, **options: Any) -> ActivationPlanner:
    """A callback for 95 % of the bytes that a training takes without a plan, and for buckets beside them."""
    return ActivationPlanner((0.95 * max(plain.peaks) + bucket_bytes) / GIB, time_limit_s=0.2, **options)


@pytest.mark.parametrize("kind", [Skipping, Manual])
@pytest.mark.long("Manual")
def test_training_is_the_same(kind: type[Module], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of two batches where Lightning accumulates; those of a manual loop, with a share for a budget."""
    caplog.set_level(logging.INFO, "ckptplan")
    manual = kind is Manual
    how: dict[str, Any] = {"kind": kind, **({"max_steps": 2 * STEPS} if manual else {"accumulate_grad_batches": 2})}
    plain, _ = fit(tmp_path, **how)
    planner = ActivationPlanner(budget="20%", time_limit_s=0.2, check="always")
    measured = [Measured()] if manual else []
    planned, trainer = fit(tmp_path, *measured, planner, **how)
    assert_same(planned, plain)
    assert planner.handle is not None
    # Planning is in one of the first two steps.
    assert max(measured[0].peaks if manual else planned.peaks[2:]) <= planner.handle.plan.budget_bytes
    stats = planner.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    assert any("of the best possible" in r.message for r in caplog.records if r.name == "ckptplan")
    assert not any("forward" in vars(m) for m in planned.modules())
    assert trainer.callback_metrics.keys() >= {"loss"}
    assert "training_step" not in {**vars(planned), **(vars(trainer.strategy) if not manual else {})}


@pytest.mark.long
def test_larger_batches_are_planned_for_and_where_there_is_no_plan_the_former_one_is_followed(tmp_path: Path) -> None:
    batches = [32, 16, 64, 512, 64, 1024, 1536, 2048]
    plain, _ = fit(tmp_path, batches=batches, max_steps=len(batches))
    planner = ActivationPlanner(plain.peaks[2] / GIB, time_limit_s=0.2)
    with warnings.catch_warnings(record=True, action="always") as said:
        planned, _ = fit(tmp_path, planner, batches=batches, max_steps=len(batches))
    assert_same(planned, plain)
    assert "[64, 32]" in planner.state_dict()["asked"]
    found = [str(w.message) for w in said if "the former plan is followed" in str(w.message)]
    assert len(found) == 3
    assert found[-1].endswith("no more plans are tried in this training")
    assert planner.tries_again is False
    with pytest.raises(InfeasibleBudgetError):  # the next training tries again, and has no former plan
        fit(tmp_path, planner, batches=batches[-1:], max_steps=1)
    assert planner.tries_again


@pytest.mark.long
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


@pytest.mark.long
def test_the_plan_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And isn't taken for another request."""

    class AsksError(Exception):
        pass

    def asks(*_: Any, **__: Any) -> Any:
        raise AsksError

    first, _ = fit(tmp_path, max_steps=2)
    planner, again, other = (planner_for(first, **more) for more in ({}, {}, {"actions": ("keep", "recompute")}))
    _, trainer = fit(tmp_path, planner, max_steps=2)
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    plain, _ = fit(tmp_path, ckpt_path=path)
    monkeypatch.setattr("ckptplan.integrations.training.solve", asks)
    planned, _ = fit(tmp_path, again, ckpt_path=path)
    assert again.handle is not None
    stats = again.handle.stats()
    assert stats.forwards > 0
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    assert_same(planned, plain)
    with pytest.raises(AsksError):
        fit(tmp_path, other, ckpt_path=path)


@pytest.mark.long
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
        fit(tmp_path, ActivationPlanner(1, time_limit_s=0.2), Fails(), kind=Noted)
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
            fit(tmp_path, ActivationPlanner(1), kind=kind)
