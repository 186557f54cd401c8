"""Long enough for a friend to join in: a network learns a spiral with many turns, for some minutes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise

run = barnraise.init()
torch.manual_seed(0)
points = torch.randn(16384, 2)
arms = (torch.sin(torch.atan2(points[:, 1], points[:, 0]) + 6 * points.norm(dim=1)) > 0).long()
model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
model.to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(points, arms), batch_size=512, shuffle=True)

model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(400):
    for batch in batches:
        for x, y in batch:
            loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    if run.history:
        run.print(f"epoch {epoch}  loss {run.history[-1]['loss']:.3f}")
run.save("model.safetensors")
