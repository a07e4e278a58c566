"""Train a LightningModule within a budget: one callback, and nothing else changed.

python examples/lightning_loop.py
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from ckptplan.integrations.lightning import ActivationPlanner


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        block = [nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128)]
        self.layers = nn.Sequential(*(layer for _ in range(2) for layer in block), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


L.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(2560, 128), torch.randint(10, (2560,)))
planner = ActivationPlanner(budget="30%", time_limit_s=3)  # of the way from the smallest peak to everything kept
trainer = L.Trainer(max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[planner])
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=512))
print(planner.summary())
