"""Trainer with the callback against Trainer without it: the same bits, within the budget, and as before afterwards."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType
from measured_trainer import MeasuredTrainer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.integrations.transformers import ActivationPlanCallback
from ckptplan.training.compiled import is_compiled

STEPS = 4
GIB = 2**30
Sample = dict[str, torch.Tensor]


class Running(nn.BatchNorm1d):
    """A batch norm of tokens, whose buffers each forward changes."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, 1)).view_as(hidden)


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    found = GPT2LMHeadModel(config)
    found.transformer.ln_f = nn.Sequential(found.transformer.ln_f, Running(32))
    return found.eval()  # as from_pretrained returns it


def samples(lengths: list[int]) -> list[Sample]:
    torch.manual_seed(1)
    rows = [torch.randint(96, (n,)) for n in lengths]
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def padded(rows: list[Sample]) -> Sample:
    most = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.stack([nn.functional.pad(row[name], (0, most - len(row[name])), value=value) for row in rows])
        for name, value in filled.items()
    }


class Twice(MeasuredTrainer):
    """Its loss needs two forwards."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        other = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
        loss = model(**inputs).loss + 0.5 * model(**other).loss
        return (loss, {}) if return_outputs else loss


class Again(MeasuredTrainer):
    """Its loss needs a second forward where there is a graph."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = model(**inputs).loss
        if loss.requires_grad:
            loss = loss + model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)}).loss
        return (loss, {}) if return_outputs else loss


def trained(
    folder: Path,
    *callbacks: TrainerCallback,
    kind: type[Trainer] = MeasuredTrainer,
    lengths: list[int] | None = None,
    options: dict[str, Any] | None = None,
    resume: bool = False,
) -> Trainer:
    more: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no", "report_to": [], **(options or {})}
    loss_func = more.pop("compute_loss_func", None)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, logging_steps=1, **more
    )
    data = samples(lengths or [24] * 64)
    trainer = kind(
        model(), args, train_dataset=data, eval_dataset=data[:4], data_collator=padded, callbacks=list(callbacks),
        compute_loss_func=loss_func,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(a: Trainer, b: Trainer) -> None:
    assert losses(a) == losses(b)
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_as_before(trainer: Trainer) -> None:
    """Nothing of the callback's is left on the trainer or its model."""
    assert not any(name in vars(trainer) for name in ("compute_loss", "_run_epoch", "_evaluate", "_finalize_training"))
    assert "call_event" not in vars(trainer.callback_handler)
    assert not any("forward" in vars(m) for m in trainer.model.transformer.modules())


def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def planner_for(plain: Any, beside_bytes: int = 0, **options: Any) -> ActivationPlanCallback:
    """A callback for 85 % of the bytes that a training takes without a plan, and for others beside them."""
    return ActivationPlanCallback((0.85 * max(plain.peaks) + beside_bytes) / GIB, time_limit_s=0.2, **options)


ZEROS = [24] * 8 + [24, 24, 24, 20] * 2
"""Lengths: the first batches' masks have only ones, and are left out by the model; later ones have zeros."""
WAYS: dict[str, dict[str, Any]] = {
    "accumulation in bf16, a loss function, checkpointing": {
        "options": {
            "gradient_accumulation_steps": 2, "bf16": True, "compute_loss_func": weighted,
            "activation_checkpointing": True,
        }
    },
    "two forwards, padding that comes later": {
        "kind": Twice, "lengths": ZEROS, "options": {"train_sampling_strategy": "sequential"}
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long("two forwards, padding that comes later")
def test_training_is_the_same_and_within_the_budget(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptplan")
    how, checkpoints = WAYS[way], "checkpointing" in way
    # Without checkpointing: dropout's numbers are drawn as without it.
    plain = trained(tmp_path, **{**how, "options": {**how["options"], "activation_checkpointing": False}})
    callback = planner_for(plain, check="always")
    planned = trained(tmp_path, callback, **how)
    assert_same(planned, plain)
    plan, handle = callback.plan, callback.handle
    assert plan is not None
    assert handle is not None
    stats = handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    assert max(planned.peaks) <= plan.budget_bytes < max(plain.peaks)
    assert f"of {len(plan.choices)} stages" in callback.summary()
    said = [record.message for record in caplog.records if record.name == "ckptplan"]
    assert sum("before this step runs" in text for text in said) == (1 if checkpoints else 2)
    assert "of the best possible" in said[-1]
    assert_as_before(planned)
    # As before, but for checkpointing, which the Trainer itself leaves on.
    assert any(getattr(m, "gradient_checkpointing", False) for m in planned.model.modules()) == checkpoints


class Compiled(MeasuredTrainer):
    """Of a model whose blocks are compiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.model.transformer.h:
            block.compile()


@pytest.mark.usefixtures("few_variants")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.long
def test_layers_are_compiled_where_it_is_asked(tmp_path: Path) -> None:
    """With the bits of a training whose user has compiled them; afterwards they aren't."""
    plain = trained(tmp_path, kind=Compiled)
    callback = planner_for(plain, compile=True)
    planned = trained(tmp_path, callback)
    assert_same(planned, plain)
    assert callback.plan is not None
    assert callback.plan.fingerprint.compiled == ("transformer.h.0", "transformer.h.1")
    assert max(planned.peaks) <= callback.plan.budget_bytes < max(plain.peaks)
    assert not any(is_compiled(module) for module in planned.model.modules())
    assert_as_before(planned)
    torch._dynamo.reset()


@pytest.mark.long
def test_batches_of_other_lengths(tmp_path: Path) -> None:
    """Shorter ones run under the plan, longer ones get a new one; where there is none, the former one is followed."""
    how: dict[str, Any] = {"lengths": [20] * 4 + [16] * 4 + [24] * 4 + [60] * 4}
    how["options"] = {"label_smoothing_factor": 0.1, "train_sampling_strategy": "sequential"}
    plain = trained(tmp_path, **how)
    callback = ActivationPlanCallback(budget_gb=0.9 * plain.peaks[2] / GIB, time_limit_s=0.2)
    with warnings.catch_warnings(record=True, action="always") as told:
        planned = trained(tmp_path, callback, **how)
    assert_same(planned, plain)
    assert callback.plan is not None
    assert max(planned.peaks[:3]) <= callback.plan.budget_bytes < planned.peaks[3]
    said = [str(w.message) for w in told]
    assert sum("planned again for [4, 24]" in text for text in said) == 1
    assert any("the peak may exceed the budget" in text and "former plan" in text for text in said)


class Stops(TrainerCallback):
    """Ends the training after two steps, which are saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == 2


@pytest.mark.long
def test_a_resumed_training_takes_the_plan_of_a_file_where_it_is_for_such_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    plain = trained(tmp_path / "plain", options=options)
    how: dict[str, Any] = {"plan_file": tmp_path / "plan.json"}
    first, second, third = (planner_for(plain, **how) for _ in range(3))
    trained(tmp_path / "planned", first, Stops(), options=options)
    with monkeypatch.context() as patch:
        patch.setattr("ckptplan.integrations.training.solve", lambda *a, **k: pytest.fail("it has a plan"))
        again = trained(tmp_path / "planned", second, options=options, resume=True)
    assert_same(again, plain)
    assert second.plan == Plan.load(how["plan_file"])
    trained(tmp_path, third, options={"label_smoothing_factor": 0.1, "max_steps": 1})
    assert Plan.load(how["plan_file"]) != second.plan


class Raises(TrainerCallback):
    def __init__(self, event: str, error: type[BaseException]) -> None:
        self.error = error
        setattr(self, event, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_pre_optimizer_step", KeyboardInterrupt), ("on_epoch_begin", ValueError), ("evaluation", ValueError)],
)
@pytest.mark.long("on_pre_optimizer_step-KeyboardInterrupt")
def test_a_training_that_is_ended_leaves_nothing_behind(event: str, error: type[BaseException], tmp_path: Path) -> None:
    made: list[Trainer] = []

    class Noted(Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            made.append(self)
            return super().create_optimizer(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            raise error

    options = {"activation_checkpointing": True, "eval_strategy": "steps", "eval_on_start": event == "evaluation"}
    callback = ActivationPlanCallback(1, time_limit_s=0.2)
    with pytest.raises(error):
        trained(tmp_path, callback, Raises(event, error), kind=Noted, options=options)
    assert_as_before(made[0])
    assert all(layer.gradient_checkpointing for layer in made[0].model.transformer.h)


@pytest.mark.long
def test_a_loop_that_begins_again_with_a_smaller_batch_is_planned_again(tmp_path: Path) -> None:
    class Short(MeasuredTrainer):
        failed = False

        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
            loss = super().training_step(model, inputs, *args)
            if not self.failed:
                self.failed = True
                raise RuntimeError("CUDA out of memory.")
            return loss

    callback = ActivationPlanCallback(1, time_limit_s=0.2)
    planned = trained(tmp_path, callback, kind=Short, options={"auto_find_batch_size": True, "max_steps": 2})
    assert planned.state.global_step == 2
    assert callback.plan is not None
    assert "[3, 24]" in callback.plan.fingerprint.inputs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it imports its compiler
@pytest.mark.long
def test_what_cannot_be_planned_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="did you mean 'budget_gb'"):
        ActivationPlanCallback(budget_gbs=12)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="are both given"):
        ActivationPlanCallback(12, budget="50%")
    with pytest.raises(InfeasibleBudgetError, match="is below"):
        trained(tmp_path, ActivationPlanCallback(budget_gb=1e-4, time_limit_s=0.2))
    with pytest.raises(UnsupportedModelError, match="torch_compile=True"):
        trained(tmp_path, ActivationPlanCallback(1), options={"torch_compile": True})
    with pytest.raises(InvalidInputError, match=r"transformers\.Trainer"):
        ActivationPlanCallback(1).on_train_begin(None, None, None)

    class Launched(ActivationPlanCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", DistributedType.FSDP)
            super().on_train_begin(args, state, control, **kwargs)

    with pytest.raises(UnsupportedModelError, match="training is distributed by FSDP1, whose bytes plans don't"):
        trained(tmp_path, Launched(1))


CALLS = {"count": 0}


class Heavy(MeasuredTrainer):
    """Its loss is set on the instance, takes more memory than the model's, counts its calls and writes to its batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss = self.heavy  # type: ignore[method-assign]
        CALLS["count"] = 0

    def heavy(self, model: nn.Module, inputs: Any, **_: Any) -> torch.Tensor:
        CALLS["count"] += 1
        inputs["input_ids"].remainder_(50)
        inputs["input_ids"].add_(1)
        logits = model(**inputs).logits
        found = [
            nn.functional.cross_entropy((logits * (i + 1)).sin().exp().flatten(0, 1), inputs["labels"].flatten())
            for i in range(8)
        ]
        return torch.stack(found).sum() * CALLS["count"]


@pytest.mark.long
def test_a_loss_on_the_instance_is_planned_with_and_what_it_changes_is_put_back(tmp_path: Path) -> None:
    plain = trained(tmp_path, kind=Heavy)
    callback = planner_for(plain)
    planned = trained(tmp_path, callback, kind=Heavy)
    assert_same(planned, plain)
    assert max(planned.peaks) <= callback.plan.budget_bytes < max(plain.peaks)  # type: ignore[union-attr]
