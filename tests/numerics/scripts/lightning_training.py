"""A Lightning module and trainer on two processes. Prints on the first one the loss of each step over all."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PROCESSES = 2


def dataset(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def prepare_data(self):
        torch.save(dataset(8, 3), "downloaded.pt")

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        everywhere = self.all_gather(loss.detach()).mean()
        if self.trainer.is_global_zero:
            print("loss", everywhere.item(), flush=True)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("validation", nn.functional.mse_loss(self.model(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(5, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy="ddp",
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(dataset(64, 1), batch_size=8), DataLoader(dataset(24, 2), batch_size=8))
    if trainer.is_global_zero:
        print("loss", trainer.callback_metrics["validation"].item(), flush=True)


if __name__ == "__main__":
    main()
