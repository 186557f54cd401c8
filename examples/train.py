import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.manual_seed(0)
points = torch.randn(32768, 2)  # to learn: on which arm of a spiral each of them lies
arms = (torch.sin(torch.atan2(points[:, 1], points[:, 0]) + 3 * points.norm(dim=1)) > 0).long()
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(points, arms), batch_size=512, shuffle=True)

run = barnraise.init(checkpoint_s=2)  # seconds; the default, 60, is for longer trainings
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(16):
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    if run.is_main and run.history:
        print(f"epoch {epoch}  loss {run.history[-1]['loss']:.3f}  machines {run.world}")
run.save("model.safetensors")
