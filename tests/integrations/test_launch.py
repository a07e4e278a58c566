"""Scripts as people write them, run by the launcher: the same bits, and something is planned."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.integrations.launch import _WhenImported, launch

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning",
    "ignore:the peak may exceed the budget. gradients", "ignore:steps differ from the planned one .gradients",
)  # fmt: skip
"""Others' warnings, and ours of a loop that accumulates: the plan is for a first step, and then made anew."""

MODEL = """
import sys, torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)  # as the tests' own process

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + F.dropout(self.back(F.gelu(self.wide(self.norm(x)))), 0.1, self.training)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

def done(model, losses):
    torch.save([*losses, *model.state_dict().values()], sys.argv[1])
"""

SCRIPTS = {
    "a loop as of nanoGPT": """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for step in range(3):
    for micro in range(2):
        tokens = torch.randint(64, (8, 32))
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(tokens, tokens)
        (loss / 2).backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        losses.append(model(tokens, tokens)[1])
    model.train()
done(model, losses)
""",
    "two optimizers, and a loss outside": """
model = Net()
matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if all(p is not m for m in matrices)]
optimizers = [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(others, 1e-3)]
losses = []
for step in range(3):
    tokens = torch.randint(64, (8, 32))
    loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.detach())
done(model, losses)
""",
    "a frozen encoder beside": """
encoder, model = Net().requires_grad_(False), Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for step in range(3):
    tokens = torch.randint(64, (8, 32))
    with torch.no_grad():
        soft = encoder(tokens)[0].softmax(-1)
    loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), soft.flatten(0, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
done(model, losses)
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = torch.utils.data.TensorDataset(torch.randint(64, (48, 32)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 8))
losses = []
for (tokens,) in loader:
    with accelerator.accumulate(model):
        loss = model(tokens, tokens)[1]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.detach())
done(accelerator.unwrap_model(model), losses)
""",
    "diffusers": """
from diffusers import DDPMScheduler, UNet2DModel
model = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
                    norm_num_groups=8, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2).train()
optimizer, scheduler = torch.optim.AdamW(model.parameters(), 1e-3), DDPMScheduler(100)
losses = []
for step in range(3):
    images, noise, steps = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16), torch.randint(100, (4,))
    predicted = model(scheduler.add_noise(images, noise, steps), steps, return_dict=False)[0]
    loss = F.mse_loss(predicted, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
done(model, losses)
""",
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (48, 32))]
args = TrainingArguments(sys.argv[1] + ".d", max_steps=3, per_device_train_batch_size=8, use_cpu=True, logging_steps=1,
                         disable_tqdm=True, save_strategy="no", report_to=[])
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
done(model, [torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])])
""",
    "lightning": """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []
    def training_step(self, batch):
        loss = self.net(batch[0], batch[0])[1]
        self.losses.append(loss.detach())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)
module = Module()
data = torch.utils.data.TensorDataset(torch.randint(64, (48, 32)))
trainer = L.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False)
trainer.fit(module, torch.utils.data.DataLoader(data, 8))
done(module.net, module.losses[-3:])
""",
    "an example script of transformers": """
from dataclasses import dataclass, field
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
@dataclass
class ModelArguments:
    layers: int = field(default=3, metadata={"help": "of the model"})
out, sys.argv = sys.argv[1], ["run_clm.py", "--output_dir", sys.argv[1] + ".d", "--max_steps", "3", "--use_cpu",
    "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--logging_steps", "1", "--report_to",
    "none", "--do_eval", "--eval_strategy", "steps", "--eval_steps", "2", "--warmup_steps", "1", "--bf16",
    "--lr_scheduler_type", "cosine", "--disable_tqdm", "true", "--save_strategy", "no"]
made, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=made.layers, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (48, 32))]
trainer = Trainer(model, args, train_dataset=data[8:], eval_dataset=data[:8],
                  compute_metrics=lambda found: {"accuracy": (found[0].argmax(-1) == found[1]).mean().item()})
trainer.train()
sys.argv = [sys.argv[0], out]
done(model, [torch.tensor([v for entry in trainer.state.log_history for k, v in entry.items()
                           if k in ("loss", "eval_loss", "eval_accuracy", "grad_norm")])])
""",
    "adapters by TRL": """
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"t{i}" for i in range(62))])}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<eos>")),
                                    pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32))
args = SFTConfig(sys.argv[1] + ".d", max_steps=3, per_device_train_batch_size=4, use_cpu=True, bf16=False,
                 disable_tqdm=True, logging_steps=1, report_to=[], save_strategy="no")
rows = [{"input_ids": torch.randint(2, 64, (24,)).tolist()} for _ in range(32)]
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
                     peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
trainer.train()
done(trainer.model, [torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])])
""",
    "an example script without a Trainer": """
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (40, 32))]
loader = torch.utils.data.DataLoader(data, shuffle=True, collate_fn=default_data_collator, batch_size=4)
decayed = [p for name, p in model.named_parameters() if "bias" not in name and "ln" not in name]
others = [p for name, p in model.named_parameters() if "bias" in name or "ln" in name]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for epoch in range(1):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses += [accelerator.gather(model(**batch).loss) for batch in loader]
done(accelerator.unwrap_model(model), losses)
""",
    "images, as of timm": """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), *(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU())
    for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(memory_format=torch.channels_last)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
scheduler, scaler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4), torch.amp.GradScaler("cpu")
losses = []
for step in range(4):
    images, labels, share = torch.randn(8, 3, 16, 16), torch.randint(10, (8,)), torch.rand(())
    images = (share * images + (1 - share) * images.flip(0)).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
        loss = share * F.cross_entropy(found, labels) + (1 - share) * F.cross_entropy(found, labels.flip(0))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    averaged.update_parameters(model)
    losses.append(loss.detach())
done(averaged, losses)
""",
    "a recurrent network in chunks": """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(64, 64)
        self.first, self.second = nn.LSTM(32, 64, batch_first=True), nn.LSTM(64, 64, batch_first=True)
    def forward(self, tokens, state):
        x, a = self.first(self.embed(tokens), state[0])
        x, b = self.second(F.dropout(x, 0.2, self.training), state[1])
        return self.head(x), (a, b)
model, losses = Words(), []
optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
state = tuple((torch.zeros(1, 8, 64), torch.zeros(1, 8, 64)) for _ in range(2))
for chunk in torch.randint(64, (8, 96)).split(24, 1):
    state = tuple(tuple(t.detach() for t in each) for each in state)
    logits, state = model(chunk[:, :-1], state)
    loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
done(model, losses)
""",
}


@pytest.fixture(autouse=True)
def as_before(no_leak: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the launcher leaves as a program may is put back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = sys.modules["__main__"]
    monkeypatch.setitem(sys.modules, "__main__", before)
    call, init = torch.nn.Module.__call__, torch.optim.Optimizer.__init__
    yield
    if (main := sys.modules["__main__"]) is not before:
        vars(main).clear()  # the script's loss has a graph, whose hooks know the model, whose class knows the loss
    assert (torch.nn.Module.__call__, torch.optim.Optimizer.__init__) == (call, init)
    assert not any(isinstance(finder, _WhenImported) for finder in sys.meta_path)
    assert "CKPTPLAN_BUDGET" not in os.environ


def written(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def saved(file: Path) -> list[torch.Tensor]:
    found: list[torch.Tensor] = torch.load(file)
    return found


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.long(but=["a loop as of nanoGPT", "transformers"])
def test_the_same_bits_with_something_planned(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    script = written(tmp_path, MODEL + SCRIPTS[kind])
    sys.argv = [script, str(tmp_path / "plain")]
    runpy.run_path(script, run_name="__main__")
    with caplog.at_level(logging.INFO, "ckptplan"):
        launch(script, [str(tmp_path / "planned")], budget="30%", time_limit_s=0.3)
    plain, planned = saved(tmp_path / "plain"), saved(tmp_path / "planned")
    assert len(plain) == len(planned) > 10
    assert all(map(torch.equal, plain, planned))
    said = [record.message for record in caplog.records if record.name == "ckptplan"]
    assert any("recomputes" in text or "swaps" in text for text in said)
    assert not any("nothing was planned" in text for text in said)


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
@pytest.mark.long
def test_a_framework_that_the_script_imports_first(tmp_path: Path, kind: str) -> None:
    """In a process of its own: here others have imported it."""
    command = ["-m", "ckptplan.run", "--budget", "30%", "--time-limit", "0.3"]
    script = written(tmp_path, MODEL + SCRIPTS[kind])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, *command, script, str(tmp_path / "out")],
        check=True, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "ckptplan: recomputes" in ran.stderr or "ckptplan: swaps" in ran.stderr


UNPLANNED = {
    "compiled as a whole": """
model = torch.compile(Net(), backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loss = model(torch.randint(64, (8, 32)), torch.randint(64, (8, 32)))[1]
loss.backward()
optimizer.step()
done(model, [loss.detach()])
""",
    "an update with a closure": """
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
tokens, losses = torch.randint(64, (8, 32)), []
def closure():
    optimizer.zero_grad()
    loss = model(tokens, tokens)[1]
    loss.backward()
    losses.append(loss.detach())
    return loss
optimizer.step(closure)
done(model, losses)
""",
}


@pytest.mark.parametrize("kind", UNPLANNED)
def test_what_cannot_be_planned_runs_without_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    launch(written(tmp_path, MODEL + UNPLANNED[kind]), [str(tmp_path / "out")], budget="50%", time_limit_s=0.3)
    assert all(tensor.isfinite().all() for tensor in saved(tmp_path / "out"))
    assert "runs without a plan: " in capsys.readouterr().err


@pytest.mark.long
def test_a_loop_and_then_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has a plan, and the Trainer that is made before the loop ends no look at it."""
    loop = """
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
tokens = torch.randint(64, (8, 32))
model.train()(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
optimizer.zero_grad()
trainer.train()"""
    text = MODEL + SCRIPTS["transformers"].replace("trainer.train()", loop)
    with caplog.at_level(logging.INFO, "ckptplan"):
        launch(written(tmp_path, text), [str(tmp_path / "out")], budget="30%", time_limit_s=0.3)
    said = [record.message for record in caplog.records if "recomputes" in record.message or "swaps" in record.message]
    assert len(said) == 2


def test_nothing_to_plan_is_said_and_the_script_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(
        tmp_path, "import sys\nfrom pathlib import Path\nPath(sys.argv[1]).write_text(__name__ + __file__)\nsys.exit(3)"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        launch("train.py", [str(tmp_path / "out"), "--lr", "1"], budget="1 GiB")
    assert end.value.code == 3
    assert (tmp_path / "out").read_text() == f"__main__{script}"
    assert sys.argv == ["train.py", str(tmp_path / "out"), "--lr", "1"]
    assert capsys.readouterr().err.startswith("ckptplan: nothing was planned: ")


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_layers_are_compiled_where_it_is_asked(tmp_path: Path) -> None:
    text = MODEL + SCRIPTS["two optimizers, and a loss outside"]
    by_hand = text.replace("model = Net()", "model = Net()\nfor block in model.blocks: block.compile()")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, script, ours in (("by hand", by_hand, []), ("planned", text, ["-m", "ckptplan.run", "--compile"])):
        command = [*ours, *(["--budget", "30%", "--"] if ours else []), written(tmp_path, script), str(tmp_path / name)]
        subprocess.run([sys.executable, *command], check=True, env=environment, timeout=600)
    assert all(map(torch.equal, saved(tmp_path / "by hand"), saved(tmp_path / "planned")))


@pytest.mark.parametrize(
    "way", ["train_dataset=data, callbacks=[callback])", "train_dataset=data)\ntrainer.add_callback(callback)"]
)
@pytest.mark.long
def test_a_trainers_own_callback_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str) -> None:
    own = """
from ckptplan.integrations.transformers import ActivationPlanCallback
callback = ActivationPlanCallback(budget="100%", time_limit_s=0.1)
"""
    text = MODEL + own + SCRIPTS["transformers"].replace("train_dataset=data)", way)
    with caplog.at_level(logging.INFO, "ckptplan"):
        launch(written(tmp_path, text), [str(tmp_path / "out")], budget="1 B")
    assert sum("keeps everything" in record.message for record in caplog.records) == 1


@pytest.mark.long
def test_errors_are_the_packages_or_the_scripts(tmp_path: Path) -> None:
    script = written(tmp_path, MODEL + SCRIPTS["a loop as of nanoGPT"])
    with pytest.raises(InfeasibleBudgetError):
        launch(script, [str(tmp_path / "out")], budget="1 KiB", time_limit_s=0.1)
    with pytest.raises(InvalidInputError, match=r"there is no file .none\.py."):
        launch("none.py", [], budget="1 GiB")
    with pytest.raises(InvalidInputError, match="can't be read"):
        launch(script, [], budget="much")
    with pytest.raises(ZeroDivisionError):
        launch(written(tmp_path, "1 / 0"), [], budget="1 GiB")


RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(1 + dist.get_rank())
losses = []
for step in range(3):
    tokens = torch.randint(64, (8, 32))
    loss = model(tokens, tokens)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
if dist.get_rank() == 0:
    done(model.module, losses)
dist.barrier()
dist.destroy_process_group()
"""


def launched(folder: Path, script: str, launcher: list[str], *ports: list[str]) -> None:
    """Compare a script under a launcher, alone and with a plan; each run gets some of `ports`, options of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ours = ["-m", "ckptplan.run", "--budget", "40%", "--time-limit", "0.3", "--"]
    file, said = written(folder, script), ""
    for name, port, planned in zip(("plain", "planned"), ports, ([], ours), strict=True):
        command = [sys.executable, "-m", *launcher, *port, *planned, file, str(folder / name)]
        ran = subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=300)
        said = ran.stderr
    assert all(map(torch.equal, saved(folder / "plain"), saved(folder / "planned")))
    assert "ckptplan: recomputes" in said or "ckptplan: swaps" in said


@pytest.mark.long
def test_accelerate_launch(tmp_path: Path) -> None:
    start = ["accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    start += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launched(tmp_path, MODEL + SCRIPTS["an example script without a Trainer"], start, [], [])


@pytest.mark.long
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
    launched(tmp_path, MODEL + RANKS, torchrun, ["--master-port", "29611"], ["--master-port", "29612"])
