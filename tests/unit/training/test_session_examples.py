"""Examples: each runs alone at small size, and learns."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.repository import ROOT
from tests.stand_in_mnist import drawn_digits, write_idx, write_mnist

EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *(words or ("--small",))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_images_trains(tmp_path: Path) -> None:
    match = re.search(r"([\d.]+)% of 500 new images", run("images.py", tmp_path))
    assert match is not None
    assert float(match[1]) > 60
    assert (tmp_path / "shapes.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_characters_trains(tmp_path: Path) -> None:
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", run("characters.py", tmp_path))]
    assert losses[-1] < 3.0
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_lora_trains(tmp_path: Path) -> None:
    match = re.search(r"(\d+)% right before, (\d+)% after", run("lora.py", tmp_path))
    assert match is not None
    assert int(match[2]) > int(match[1]) + 5


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_predict_labels_all_images(tmp_path: Path) -> None:
    assert "2000 images on 1 machines" in run("predict.py", tmp_path)
    labels = (tmp_path / "labels.txt").read_text().splitlines()
    assert len(labels) == 2000
    assert set(labels) <= {"0", "1", "2"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "adapter"), [("finetune_llm.py", "adapter"), ("sft_trainer.py", "sft-adapter")]
)
def test_example_of_a_trainer_learns(tmp_path: Path, name: str, adapter: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    pytest.importorskip("trl", reason="needs trl")
    losses = [float(text) for text in re.findall(r"'loss': '?([\d.]+)", run(name, tmp_path))]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / adapter / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_sweep_finds_values(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    match = re.search(
        r"8 trials; best: ([\d.]+)% errors with {'width': \d+, 'rate': ", run("sweep.py", tmp_path)
    )
    assert match is not None
    assert float(match[1]) < 45


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_fabric_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    printed = run("fabric.py", tmp_path)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.95 * losses[0], printed
    assert (tmp_path / "spiral.ckpt").exists()


def losses_in(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"epoch \d+ of \d+: loss ([\d.]+), workers: 1$", output, re.M)]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_digits_trains_and_is_evaluated(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 1024, 10_000)
    output = run("digits.py", tmp_path, "--epochs", "2", "--batch", "32")
    losses = losses_in(output)
    assert len(losses) == 2
    assert losses[1] < losses[0] * 0.8
    assert output.splitlines()[-1] == "saved: digits.safetensors"
    output = run("evaluate_digits.py", tmp_path, "--batch", "500")
    match = re.fullmatch(
        r"([\d.]+)% of 10000 images are right, workers: 1\n"
        r"saved: mistakes.csv, with the (\d+) others\n",
        output,
    )
    assert match is not None, output
    assert 60 < float(match[1]) < 100
    with (tmp_path / "mistakes.csv").open() as file:
        mistakes = list(csv.DictReader(file))
    assert len(mistakes) == int(match[2])
    assert float(match[1]) == pytest.approx(100 - len(mistakes) / 100)
    labels = drawn_digits(10_000, 2)[1].tolist()
    assert all(labels[int(row["image"])] == int(row["digit"]) != int(row["answer"]) for row in mistakes)


def test_example_digits_reads_plain_and_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from digits import digits

    for suffix in ("", ".gz"):
        folder = tmp_path / f"mnist{suffix}"
        write_mnist(folder, 20, 30, suffix)
        for part, count, seed in (("train", 20, 1), ("t10k", 30, 2)):
            images, labels = digits(folder, part).tensors
            expected = drawn_digits(count, seed)
            assert images.shape == (count, 1, 28, 28)
            assert torch.equal(images[:, 0], expected[0])
            assert torch.equal(labels, expected[1].long())
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte", expected[1])
    data = bytearray((tmp_path / "mnist" / "t10k-labels-idx1-ubyte").read_bytes())
    data[2] = 13  # numbers of four bytes
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(data)
    with pytest.raises(SystemExit, match="t10k-labels-idx1-ubyte is no IDX file of bytes"):
        digits(tmp_path / "mnist", "t10k")
    with pytest.raises(SystemExit, match="has neither train-images-idx3-ubyte nor train-images"):
        digits(tmp_path, "train")


def test_example_digits_uses_data_that_a_run_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from digits import arguments

    monkeypatch.delenv("BARNRAISE_DATA_MNIST", raising=False)
    assert arguments("Text.").parse_args([]).data == "mnist"
    monkeypatch.setenv("BARNRAISE_DATA_MNIST", str(tmp_path))
    assert arguments("Text.").parse_args([]).data == str(tmp_path)
    assert arguments("Text.").parse_args(["--data", "other"]).data == "other"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_diffusion_lora_trains_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of a folder, of any size and kind; what is saved is what diffusers loads."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from diffusion_lora import drawn, frozen_unet, pictures_in
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    with pytest.raises(SystemExit, match="has no picture in PNG or JPEG"):
        pictures_in(folder)
    expected = drawn(48)
    for number, picture in enumerate(expected):
        pixels = ((picture + 1) * 127.5).round().to(torch.uint8).movedim(0, 2).numpy()
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    Image.new("L", (40, 60), 255).save(folder / "white.JPG")
    pictures = pictures_in(folder)
    assert pictures.shape == (49, *expected.shape[1:])
    torch.testing.assert_close(pictures[:48], expected, rtol=0, atol=0.01)
    assert float(pictures[48].min()) > 0.98

    output = run("diffusion_lora.py", tmp_path, "--data", str(folder), "--epochs", "3", "--batch", "16")
    losses = losses_in(output)
    assert len(losses) == 3
    assert losses[2] < losses[0] - 0.02
    assert re.search(r"^saved: the folder adapter, \d+% of all parameters", output, re.M)
    saved = load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors")
    unet = frozen_unet()
    adapter = str(tmp_path / "adapter")
    unet.load_lora_adapter(adapter, prefix=None, adapter_name="default", use_safetensors=True)
    loaded = {name: value for name, value in unet.state_dict().items() if ".lora_" in name}
    assert len(loaded) == len(saved) > 0
    for name, value in saved.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], value), name
    assert all(value.any() for name, value in saved.items() if "lora_B" in name), "they start at zero"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_example_finetune_split_trains_alone_and_peft_loads_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text.md").write_text("the quick brown fox jumps over the lazy dog\n" * 600)
    monkeypatch.setenv("BARNRAISE_MODEL_BASE", str(tmp_path / "base"))
    printed = run("finetune_split.py", tmp_path, "--text", str(tmp_path / "text"), "--epochs", "2")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = [value for name, value in tuned.named_parameters() if "lora_B" in name]
    assert trained
    assert all(value.abs().sum() > 0 for value in trained)
