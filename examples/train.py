import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise

run = barnraise.init(checkpoint_s=2)  # seconds; the default, 60, is for longer trainings
torch.manual_seed(0)
points = torch.randn(32768, 2)  # to learn: on which arm of a spiral each of them lies
arms = (torch.sin(torch.atan2(points[:, 1], points[:, 0]) + 3 * points.norm(dim=1)) > 0).long()
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
model.to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(points, arms), batch_size=512, shuffle=True)

model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(16):
    for batch in batches:  # one iteration is one step: 512 samples on all machines together
        for x, y in batch:  # this machine's part of the step, in micro-batches
            loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
            loss.backward()
            optimizer.step()  # takes effect on all machines at once, when the step is complete
            optimizer.zero_grad()
            run.log(loss=loss)
    if run.history:
        run.print(f"epoch {epoch}  loss {run.history[-1]['loss']:.3f}  machines {run.world}")
run.save("model.safetensors")
