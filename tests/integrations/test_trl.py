"""TRL's trainer for supervised fine-tuning with the callback against without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from measured_trainer import MeasuredTrainer
from peft import LoraConfig
from test_plain_loops import llama
from test_transformers import assert_same
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.integrations.transformers import ActivationPlanCallback

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


STEPS = 4


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"t{i}" for i in range(94))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


class MeasuredSFTTrainer(MeasuredTrainer, SFTTrainer):
    """An SFTTrainer whose steps are measured."""


class MeasuredDPOTrainer(MeasuredTrainer, DPOTrainer):
    """A DPOTrainer whose steps are measured."""


def made(folder: Path, *callbacks: Any, **options: Any) -> MeasuredSFTTrainer:
    model = llama()
    peft = options.pop("peft_config", None)
    rows = [{"input_ids": torch.randint(2, 96, (24,)).tolist()} for _ in range(40)]
    args = SFTConfig(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, bf16=False, disable_tqdm=True,
        logging_steps=1, report_to=[], save_strategy="no", **options,
    )  # fmt: skip
    return MeasuredSFTTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        callbacks=list(callbacks), peft_config=peft,
    )  # fmt: skip


def trained(*args: Any, **options: Any) -> MeasuredSFTTrainer:
    trainer = made(*args, **options)
    trainer.train()
    return trainer


def test_training_with_adapters_and_packing_is_the_same(tmp_path: Path) -> None:
    how: dict[str, Any] = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    how |= {"packing": True, "max_length": 32}
    callback = ActivationPlanCallback(budget="20%", time_limit_s=0.2, check="always")
    plain, planned = trained(tmp_path, **how), trained(tmp_path, callback, **how)
    assert_same(planned, plain)
    logged = [[{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
               for entry in trainer.state.log_history] for trainer in (planned, plain)]  # fmt: skip
    assert logged[0] == logged[1]  # TRL's own metrics, too
    assert callback.handle is not None
    stats = callback.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0
    assert max(planned.peaks) <= callback.handle.plan.budget_bytes


@pytest.mark.long
def test_preferences(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> MeasuredDPOTrainer:
        model = llama()
        texts = {name: [" ".join(f"t{(7 * i + j + k) % 94}" for j in range(12)) for i in range(16)]
                 for k, name in enumerate(("prompt", "chosen", "rejected"))}  # fmt: skip
        args = DPOConfig(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, bf16=False, disable_tqdm=True,
            logging_steps=1, report_to=[], save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = MeasuredDPOTrainer(
            model, ref_model=copy.deepcopy(model), args=args, train_dataset=Dataset.from_dict(texts),
            processing_class=tokenizer(), callbacks=list(callbacks),
        )  # fmt: skip
        trainer.train()
        return trainer

    callback = ActivationPlanCallback(budget="20%", time_limit_s=0.2, check="always")
    plain, planned = train(), train(callback)
    assert_same(planned, plain)
    assert callback.handle is not None
    beside_bytes = sum(p.nbytes for p in plain.ref_model.parameters())  # which the loss reads, and isn't measured
    assert max(planned.peaks) <= callback.handle.plan.budget_bytes - beside_bytes < max(plain.peaks)
    stats = callback.handle.stats()
    assert stats.recomputed_stages + stats.swapped_out_bytes > 0


def grpo(folder: Path, *callbacks: Any) -> GRPOTrainer:
    """A training whose steps generate first."""
    prompts = [" ".join(f"t{(7 * i + j) % 94}" for j in range(3 + i % 9)) for i in range(16)]
    args = GRPOConfig(
        str(folder), max_steps=3, per_device_train_batch_size=4, num_generations=4, max_completion_length=24,
        use_cpu=True, bf16=False, disable_tqdm=True, report_to=[], save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    return GRPOTrainer(
        llama(), lambda completions, **_: [float(len(set(text))) for text in completions], args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer(), callbacks=list(callbacks),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*the peak may exceed the budget", "ignore:steps differ", "ignore:input ")
@pytest.mark.long
def test_a_training_whose_batches_differ(tmp_path: Path) -> None:
    """With the completions of each batch: the steps are those without a plan."""
    callback = ActivationPlanCallback(budget="5%", actions=("keep", "recompute"), time_limit_s=0.2)
    plain, planned = grpo(tmp_path), grpo(tmp_path, callback)
    for trainer in (plain, planned):
        torch.manual_seed(0)
        trainer.train()
    assert_same(planned, plain)
    assert callback.handle is not None
    stats = callback.handle.stats()
    assert stats.forwards >= 2
    assert stats.recomputed_stages > 0


def test_offloading_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = made(tmp_path, ActivationPlanCallback(1))
    trainer.args.activation_offloading = True  # which its constructor takes with a GPU alone
    with pytest.raises(UnsupportedModelError, match="activation_offloading=True"):
        trainer.train()
