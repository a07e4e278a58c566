"""Models and settings from files: what is read of them, and what is named as not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, assert_clean_error, output
from transformers import BertConfig, GPT2Config, LlamaConfig, TrainingArguments, ViTConfig

from ckptplan.core.errors import InvalidInputError
from ckptplan.fitting.survey import DeviceFit
from ckptplan.integrations import configs
from ckptplan.integrations.quantized import QuantizedLinear

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
lora_dropout: 0.1
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
    model = configs.make_model(configs.ConfiguredTraining(str(folder / "model")))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.training
    make, length = configs.make_inputs(model, 16)
    inputs = make(3)
    assert length == 16
    assert {name: tuple(t.shape) for name, t in inputs.items()} == {"input_ids": (3, 16), "labels": (3, 16)}
    adapted = configs.make_model(configs.ConfiguredTraining(str(folder / "model"), lora="r=4,targets=q_proj,v_proj"))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"lora": "16"}, "can't be read; give r=16"),
        ({"lora": "r=4,bits=3"}, "can't be read; give r=16"),
        ({"dtype": "float8"}, "'float8' isn't a type of weights; choose from float32, bfloat16, float16"),
        ({"lora": "r=4,targets=absent"}, "absent"),
        ({"config": "absent"}, "can't be read"),
    ],
)
def test_what_can_not_be_made(job: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        configs.make_model(configs.ConfiguredTraining(**{"config": str(folder / "model"), **job}))


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
    make, _ = configs.make_inputs(configs.make_model(configs.ConfiguredTraining(str(path))), None)
    assert {name: tuple(t.shape) for name, t in make(3).items()} == shapes
    if kind == "sequence":
        assert_clean_error(run("fit", "--config", str(path), "--seq", "64"), "the model has 48 positions")


def test_code_of_a_config_is_not_imported(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "evil"}))
    with pytest.raises(InvalidInputError, match=r"no model of type 'evil' \(the code that its auto_map names isn't"):
        configs.make_model(configs.ConfiguredTraining(str(path)))


def test_axolotl(folder: Path) -> None:
    job = configs.read_axolotl(folder / "lora.yaml")
    assert (job.batch, job.length, job.optimizer, job.amp) == (2, 64, "paged_adamw_8bit", "bfloat16")
    assert (job.accumulate, job.dtype, job.float32) == (True, "bfloat16", ())
    assert job.lora == "r=4,targets=all-linear,dropout=0.1"
    assert Path(job.config) == folder / "model"
    notes = "\n".join(job.notes)
    assert "not understood, and not counted: sample_packing" in notes
    assert "checkpointing is left to the plan" in notes
    assert configs.ConfiguredTraining(length=32).over(job).length == 32
    (folder / "bad.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(InvalidInputError, match="can't be parsed"):
        configs.read_axolotl(folder / "bad.yaml")


def changed(folder: Path, *changes: str, without: tuple[str, ...] = ()) -> Path:
    """An axolotl file with other lines."""
    named = [line.partition(":")[0] for line in changes]
    lines = [line for line in AXOLOTL.splitlines() if line and line.partition(":")[0] not in (*named, *without)]
    (folder / "changed.yaml").write_text("\n".join([*lines, *changes]))
    return folder / "changed.yaml"


LORA = ("adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear")


@pytest.mark.parametrize(
    ("changes", "without", "expected"),
    [
        (["adapter: qlora", "load_in_4bit: true"], (), {"lora": "r=4,targets=all-linear,dropout=0.1,bits=4,upcast=no"}),
        (["load_in_8bit: true", "lora_target_modules: [q_proj, v_proj]"], ("lora_target_linear",),
         {"lora": "r=4,targets=q_proj,v_proj,dropout=0.1,bits=8,upcast=no"}),
        ([], LORA, {"lora": None, "dtype": "bfloat16", "float32": ("norm", "embed_tokens", "lm_head")}),
        (["flash_attention: true"], LORA, {"lora": None, "dtype": "bfloat16", "float32": ()}),
        (["bf16: false", "fp16: true"], (), {"dtype": "float16", "amp": "float16"}),
        (["bf16: full"], (), {"dtype": "bfloat16", "amp": None}),
        (["bf16: false"], LORA, {"dtype": "float32", "amp": None, "float32": ()}),
        ([], ("optimizer", "sequence_len", "micro_batch_size"),
         {"optimizer": "adamw_torch_fused", "length": 512, "batch": 1}),
    ],
)  # fmt: skip
def test_axolotls_rules(changes: list[str], without: tuple[str, ...], expected: dict[str, Any], folder: Path) -> None:
    job = configs.read_axolotl(changed(folder, *changes, without=without)).as_trained()
    assert {name: getattr(job, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        (["adapter: llama-adapter"], (), "adapter: 'llama-adapter' isn't counted; lora and qlora are"),
        (["load_in_4bit: true"], LORA, "adapter: None isn't counted with quantized weights"),
        (["optimizer: galore_adamw"], (), "'galore_adamw' is not known by name"),
        (["optimizer: adamv"], (), "'adamv' is not known by name"),
    ],
)
def test_what_axolotls_files_may_not_say(
    changes: list[str], without: tuple[str, ...], message: str, folder: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        configs.read_axolotl(changed(folder, *changes, without=without))


def test_training_arguments(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({
        "output_dir": "out", "per_device_train_batch_size": 3, "fp16": True, "optim": "adafactor", "neftune_noise": 5,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
    }))  # fmt: skip
    job = configs.read_training_arguments(path)
    assert (job.batch, job.optimizer, job.amp, job.accumulate) == (3, "adafactor", "float16", None)
    assert job.notes == ("not understood, and not counted: neftune_noise",)
    path.write_text("{}")
    job = configs.read_training_arguments(path).as_trained()
    assert (job.batch, job.optimizer, job.amp, job.dtype) == (8, TrainingArguments.default_optim, None, None)


def test_the_type_of_the_weights(folder: Path) -> None:
    path = str(folder / "model")
    types = {
        name: {p.dtype for p in configs.make_model(configs.ConfiguredTraining(path, dtype=name)).parameters()}
        for name in (None, "float32", "float16")
    }
    assert types == {None: {torch.bfloat16}, "float32": {torch.float32}, "float16": {torch.float16}}
    raised = configs.make_model(configs.ConfiguredTraining(path, float32=("norm", "embed_tokens", "lm_head")))
    full = {name.split(".")[-2] for name, p in raised.named_parameters() if p.dtype == torch.float32}
    assert full == {"norm", "input_layernorm", "post_attention_layernorm", "embed_tokens", "lm_head"}


# --- quantized weights ---

ATTENTION, MLP, EMBEDDINGS, NORMS, ADAPTERS = 4 * 32 * 32, 3 * 32 * 64, 2 * 96 * 32, 5 * 32, 4 * (4 * 64 + 3 * 96)
"""Values of the linear layers of one block, of embedding and head, of all norms, of the adapters in one block."""


def held(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *(b for n, b in model.named_buffers() if "inv_freq" not in n)]
    return sum(t.numel() * t.element_size() for t in tensors)


def of_4_bits(values: int) -> int:
    blocks = -(-values // 64)
    return values // 2 + blocks + 4 * (-(-blocks // 256) + 1 + 16)


SCALES = 4 * 2 * (4 * 32 + 2 * 64 + 32)  # of 8 bits
IN_4_BITS = 2 * (4 * of_4_bits(32 * 32) + 3 * of_4_bits(32 * 64))


@pytest.mark.parametrize(
    ("lora", "quantized", "others", "adapters"),
    [
        ("r=4,targets=all-linear,bits=4", IN_4_BITS, 4, 2 * ADAPTERS),
        ("r=4,targets=all-linear,bits=4,upcast=no", IN_4_BITS, 2, 2 * ADAPTERS),
        ("r=4,targets=q_proj,bits=8,upcast=no", 2 * (ATTENTION + MLP) + SCALES, 2, 2 * 4 * 64),
    ],
)
def test_the_layout_of_quantized_weights(lora: str, quantized: int, others: int, adapters: int, folder: Path) -> None:
    model = configs.make_model(configs.ConfiguredTraining(str(folder / "model"), lora=lora))
    assert held(model) == quantized + others * (EMBEDDINGS + NORMS) + 4 * adapters
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == adapters
    assert ("M in 4 bits and" in configs.described(model)) == ("bits=4" in lora)


def test_gpt2s_layers_are_quantized_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = GPT2Config(
        vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=16, architectures=["GPT2LMHeadModel"]
    )
    path.write_text(json.dumps(config.to_dict()))
    model = configs.make_model(configs.ConfiguredTraining(str(path), lora="r=4,targets=c_attn,bits=4"))
    sizes = {n.rpartition(".")[2]: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert sizes.keys() == {"base_layer", "c_proj", "c_fc"}  # c_attn is below its adapter
    assert (sizes["base_layer"].in_features, sizes["base_layer"].out_features) == (32, 96)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_saves_and_makes_what_a_full_one_does_not(bits: int) -> None:
    """With 4 bits no input is saved; each product makes the weight in full, in forward and in backward."""
    with torch.device("meta"):
        layer = QuantizedLinear(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16), bits)
        x = torch.empty(8, 64, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert [t.shape for t in saved] == ([] if bits == 4 else [x.shape])
    assert (y.shape, y.dtype) == (torch.Size([8, 32]), torch.bfloat16)
    y.backward(torch.empty_like(y))
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer(x.float()).dtype == torch.float32


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
        configs.make_model(configs.ConfiguredTraining())


@pytest.mark.long
def test_fit_and_estimate_take_files(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(model: Any, make_inputs: Any, devices: list[Any], *_: Any, **__: Any) -> list[DeviceFit]:
        """Of a search that tests/fitting/ has: the model and inputs of the file are those searched for."""
        assert type(model).__name__ == "PeftModel"
        assert make_inputs(3)["input_ids"].shape == (3, 64)
        return [DeviceFit(device, 2, 1 << 34, 1 << 30, 1 << 30, None, 2, 2, None) for device in devices]

    monkeypatch.setattr("ckptplan.fitting.survey.survey", survey)
    described = (
        "PeftModel, 0.0 M parameters (0.0 M in bfloat16 and 0.0 M in float32), 0.0 M trained; 2 x 64 tokens; optimizer "
        "paged_adamw_8bit, autocast bfloat16"
    )
    for command in (["fit", "--device", "a100-40gb"], ["estimate", "--device", "a100-40gb"]):
        found = output(run(*command, "--axolotl", str(folder / "lora.yaml")))
        assert described in found
        assert "note: not understood, and not counted: sample_packing" in found
        assert "A100 40GB" in found or "a100-40gb" in found
        assert_clean_error(run(command[0]), "give a MODEL (package.module:name), or --config or --axolotl")
        assert_clean_error(run(command[0], "a:b", "--seq", "3"), "go without a MODEL")


@pytest.mark.long
def test_options_go_before_files(run: Run, folder: Path) -> None:
    options = ["--dtype", "float32", "--batch", "3", "--seq", "16", "--optimizer", "sgd"]
    options += ["--lora", "r=2,targets=q_proj"]
    found = output(run("estimate", "--axolotl", str(folder / "lora.yaml"), "--device", "a100-40gb", *options))
    assert "(0.0 M in float32), 0.0 M trained; 3 x 16 tokens; optimizer sgd, autocast bfloat16" in found
    config = ("--config", str(folder / "model"), "--seq", "16")
    turns = run("estimate", *config, "--device", "a100-40gb", "--batches", "1,2")
    assert "2 in turn" in turns.stdout


@pytest.mark.parametrize("adapter", ["", "adapter: qlora"])
@pytest.mark.long
def test_sharded_models_of_files(adapter: str, run: Run, folder: Path) -> None:
    """Under Trainer, trained weights of a sharded model are in float32 and gathered in autocast's type."""
    path = str(changed(folder, *([adapter] if adapter else []), without=() if adapter else LORA))
    found = output(
        run("estimate", "--axolotl", path, "--fsdp", "2", "--device", "a100-40gb", "--optimizer", "adamw_torch")
    )
    if not adapter:
        assert "(0.0 M in float32), 0.0 M trained" in found
        state = next(line for line in found.splitlines() if line.startswith("optimizer state"))
        values = 2 * (ATTENTION + MLP) + EMBEDDINGS + NORMS
        assert state.split()[2:] == [f"{2 * 4 * values // 2 / 2**10:.2f}", "KiB"]
