"""A diffusion model of diffusers learns new pictures by LoRA: only an adapter of peft is trained and saved.

    python diffusion_lora.py                                      # pictures that the script draws
    barnraise run --data pictures=./pictures diffusion_lora.py    # your own, on all machines

The frozen UNet is made from a seed here, so nothing is downloaded. Yours comes from
UNet2DConditionModel.from_pretrained(barnraise.model_path("base")), with barnraise run --model base=FOLDER.
"""

import argparse
import os
from pathlib import Path

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.utils import logging
from peft import LoraConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import barnraise

SIZE = 16
# Layers of the UNet that get thin matrices. Without a text, its attention to one (attn2) learns nothing.
LAYERS = ["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "conv1", "conv2"]


def frozen_unet():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=SIZE,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return unet.requires_grad_(False)


def drawn(count):
    """Return pictures of one bright disc on a dark ground, the same ones on all machines."""
    draw = torch.Generator().manual_seed(5)
    x, y, size, *colour = torch.rand(6, count, 1, 1, generator=draw)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    apart = ((rows / SIZE - 0.3 - 0.4 * y) ** 2 + (columns / SIZE - 0.3 - 0.4 * x) ** 2).sqrt()
    disc = apart < 0.1 + 0.15 * size
    return torch.stack([disc * (0.5 + 0.5 * part) * 2 - 1 for part in colour], dim=1)


def pictures_in(folder):
    """Return the pictures of a folder, cut to a square, in the order of their names."""
    import numpy as np
    from PIL import Image, ImageOps

    files = sorted(
        path for path in Path(folder).iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg")
    )
    if not files:
        raise SystemExit(f"the folder {folder} has no picture in PNG or JPEG")
    pictures = [ImageOps.fit(Image.open(path).convert("RGB"), (SIZE, SIZE)) for path in files]
    return torch.stack([torch.tensor(np.array(picture)).movedim(2, 0) / 127.5 - 1 for picture in pictures])


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = os.environ.get("BARNRAISE_DATA_PICTURES")
    options.add_argument("--data", default=default, metavar="FOLDER", help="pictures (default: drawn ones)")
    options.add_argument("--pictures", type=int, default=512, help="how many are drawn")
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--batch", type=int, default=32, help="pictures of a step, on all machines together")
    given = options.parse_args()
    pictures = pictures_in(given.data) if given.data else drawn(given.pictures)

    run = barnraise.init(seed=4)
    unet, noises = frozen_unet(), DDPMScheduler()
    unet.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS))
    thin = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(thin, lr=2e-3)
    loader = DataLoader(TensorDataset(pictures), batch_size=given.batch, shuffle=True)

    def loss_of(clean):
        """Return how far the UNet is from the noise that was mixed into some pictures."""
        noise = torch.randn_like(clean)
        times = torch.randint(len(noises), (len(clean),), device=clean.device)
        no_text = torch.zeros(len(clean), 1, unet.config.cross_attention_dim, device=clean.device)
        guess = unet(noises.add_noise(clean, noise, times), times, no_text).sample
        return nn.functional.mse_loss(guess, noise)

    unet, optimizer, batches = run.prepare(unet, optimizer, loader)
    for epoch in run.epochs(given.epochs):
        before = len(run.history)
        for batch in batches:
            for (clean,) in batch:
                loss = loss_of(clean)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        losses = [step["loss"] for step in run.history[before:]]
        if losses:
            loss = sum(losses) / len(losses)
            run.print(f"epoch {epoch + 1} of {given.epochs}: loss {loss:.4f}, workers: {run.world}")
    logging.set_verbosity_error()  # or it warns of a cast that does not happen
    unet.save_lora_adapter("adapter")  # on every machine, so that it is there if one is lost
    share = sum(part.numel() for part in thin) / sum(part.numel() for part in unet.parameters())
    run.print(f"saved: the folder adapter, {share:.0%} of all parameters; the UNet itself is unchanged")


if __name__ == "__main__":
    main()
