"""Models and settings from files: what is read of them, and what is named as not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, assert_clean_error
from transformers import BertConfig, LlamaConfig, ViTConfig

from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations import configs

# PEFT's use of a deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

AXOLOTL = """
base_model: ./model
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 4
adapter: lora
lora_r: 4
lora_alpha: 16
lora_target_linear: true
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
sample_packing: true
learning_rate: 0.0002
datasets: [{path: nowhere, type: alpaca}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    data = config.to_dict() | {"auto_map": {"AutoModel": "evil.Model"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(data))
    (tmp_path / "model" / "evil.py").write_text("raise SystemExit('imported')")
    (tmp_path / "lora.yaml").write_text(AXOLOTL)
    return tmp_path


def test_a_model_is_made_of_its_config(folder: Path) -> None:
    model = configs.make_model(configs.Job(str(folder / "model")))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.training
    make, length = configs.make_inputs(model, 16)
    inputs = make(3)
    assert length == 16
    assert {name: tuple(t.shape) for name, t in inputs.items()} == {"input_ids": (3, 16), "labels": (3, 16)}
    adapted = configs.make_model(configs.Job(str(folder / "model"), lora="r=4,targets=q_proj,v_proj"))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"lora": "16"}, "can't be read; give r=16"),
        ({"lora": "r=4,targets=absent"}, "absent"),
        ({"config": "absent"}, "can't be read"),
    ],
)
def test_what_can_not_be_made(job: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        configs.make_model(configs.Job(**{"config": str(folder / "model"), **job}))


KINDS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "image": (
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32,
                  architectures=["ViTForImageClassification"]),
        {"pixel_values": (3, 3, 32, 32), "labels": (3,)},
    ),
    "sequence": (
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=96,
                   max_position_embeddings=48, architectures=["BertForSequenceClassification"]),
        {"input_ids": (3, 48), "labels": (3,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_follow_from_the_head(kind: str, run: Run, tmp_path: Path) -> None:
    config, shapes = KINDS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    make, _ = configs.make_inputs(configs.make_model(configs.Job(str(path))), None)
    assert {name: tuple(t.shape) for name, t in make(3).items()} == shapes
    found = run("fit", "--config", str(path), "--device", "a100-40gb", "--optimizer", "adamw")
    assert found.exit_code == 0, found.output
    if kind == "sequence":
        assert_clean_error(run("fit", "--config", str(path), "--seq", "64"), "the model has 48 positions")


def test_code_of_a_config_is_not_imported(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "evil"}))
    with pytest.raises(InvalidInputError, match=r"no model of type 'evil' \(the code that its auto_map names isn't"):
        configs.make_model(configs.Job(str(path)))


def test_axolotl(folder: Path) -> None:
    job = configs.read_axolotl(folder / "lora.yaml")
    assert (job.batch, job.length, job.optimizer, job.amp, job.accumulate) == (2, 64, "adamw", "bfloat16", True)
    assert job.lora == "r=4,targets=all-linear"
    assert Path(job.config) == folder / "model"
    notes = "\n".join(job.notes)
    assert "not understood, and not counted: sample_packing" in notes
    assert "optimizer paged_adamw_8bit isn't known; counted as adamw" in notes
    assert "checkpointing is left to the plan" in notes
    assert configs.Job(length=32).over(job).length == 32
    (folder / "bad.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(InvalidInputError, match="can't be parsed"):
        configs.read_axolotl(folder / "bad.yaml")


def test_training_arguments(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({
        "output_dir": "out", "per_device_train_batch_size": 3, "fp16": True, "optim": "adafactor", "neftune_noise": 5,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
    }))  # fmt: skip
    job = configs.read_training_arguments(path)
    assert (job.batch, job.optimizer, job.amp, job.accumulate) == (3, "adafactor", "float16", None)
    assert job.notes == ("not understood, and not counted: neftune_noise",)


def test_numbers_in_files(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": "4", "gradient_accumulation_steps": "auto"}))
    job = configs.read_training_arguments(path)
    assert job.batch == 4
    assert job.notes == ("gradient_accumulation_steps is 'auto', which isn't known here; give a number",)
    path.write_text(json.dumps({"per_device_train_batch_size": "many"}))
    with pytest.raises(InvalidInputError, match="per_device_train_batch_size: 'many' is not a whole number"):
        configs.read_training_arguments(path)
    with pytest.raises(InvalidInputError, match="give --config, or base_model"):
        configs.make_model(configs.Job())


def test_fit_takes_files(run: Run, folder: Path) -> None:
    found = run("fit", "--axolotl", str(folder / "lora.yaml"), "--device", "a100-40gb")
    assert found.exit_code == 0, found.output
    assert "PeftModel" in found.stdout
    assert "2 x 64 tokens; optimizer adamw, autocast bfloat16" in found.stdout
    assert "note: not understood, and not counted: sample_packing" in found.stdout
    assert "a100-40gb" in found.stdout
    assert_clean_error(run("fit"), "give a MODEL (package.module:name), or --config or --axolotl")
    assert_clean_error(run("fit", "a:b", "--seq", "3"), "go without a MODEL")
