"""`barnraise export` as it is typed: the model, the adapter or the merged model of a run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from safetensors.torch import load_file

from barnraise.agent_client.run_requests import PartRow, RunRow, TrainingProgress
from barnraise.cli.runs.export import export_command
from barnraise.cli.runs.resume import _describe_newer_steps, _next_step
from barnraise.core.errors import RunError
from tests.unit.cli.typed import Machine

SCRIPT = """\
import peft, torch, transformers
import barnraise

torch.manual_seed(0)
base = transformers.LlamaForCausalLM.from_pretrained("FOLDER", local_files_only=True)
config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
model = peft.get_peft_model(base, config)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
run = barnraise.init(seed=1, checkpoint_s=0)  # a checkpoint of each step
rows = torch.arange(64).reshape(8, 8) % 32
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
model, optimizer, batches = run.prepare(model, optimizer, loader)
for _ in run.epochs(2):
    for batch in batches:
        for (words,) in batch:
            model(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
run.save("tuned")
"""
PATIENCE_S = 500.0  # three processes import transformers
WORDS = torch.arange(8)[None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--adapter", "--merged"), "--adapter and --merged exclude each other"),
        (("--base", "llama"), "--base was given without --merged"),
        (("--adapter", "--base", "llama"), "--base was given without --merged"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(export_command, ["train-8f3z", "out", *words])
    assert isinstance(result.exception, RunError)
    assert result.exception.message == message
    assert result.exception.hint


def test_base_is_a_folder_or_an_id_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    branch = tmp_path / "hub" / "models--org--name" / "refs" / "main"
    for folder in (snapshot, branch.parent, tmp_path / "llama"):
        folder.mkdir(parents=True)
    branch.write_text("a" * 40)
    bases: list[Path] = []

    def export(run: str, folder: Path, form: str, base: Path) -> int:
        bases.append(base)
        return 0

    monkeypatch.setattr("barnraise.cli.runs.resume.export", export)
    for word in ("org/name", "llama"):
        result = CliRunner().invoke(export_command, ["train-8f3z", "out", "--merged", "--base", word])
        assert result.exception is None or result.exit_code == 0, result.exception
    assert bases == [snapshot, Path("llama")]
    result = CliRunner().invoke(export_command, ["train-8f3z", "out", "--merged", "--base", "./lama"])
    assert isinstance(result.exception, RunError)
    assert "there is no folder of a model at" in result.exception.message


@pytest.mark.parametrize(
    ("phase", "code", "hint"),
    [
        ("running", None, "Try again later"),
        ("ended", 0, "barnraise attach train-8f3z"),
        ("ended", 1, "Switch on nas"),
    ],
)
def test_run_without_a_checkpoint_in_reach_says_what_to_do(phase: str, code: int | None, hint: str) -> None:
    row = RunRow(
        run="train-8f3z", title="", command=("train.py",), by="mac", at=0, phase=phase, generation=1,
        version=1, sentence="", machines=("mac", "nas"), code=code,
    )  # fmt: skip
    assert hint in _next_step(row, ["nas"])
    assert "nas" not in _next_step(row, []), "no machine that is here is to be switched on"


@pytest.mark.parametrize(
    ("step", "phase", "code", "words"),
    [
        (75, "ended", 0, ""),
        (80, "ended", 0, "barnraise attach train-8f3z"),
        (80, "ended", 1, "barnraise resume train-8f3z"),
        (80, "running", None, "checkpoint_s"),
    ],
)
def test_steps_after_the_checkpoint_are_named(step: int, phase: str, code: int | None, words: str) -> None:
    row = RunRow(
        run="train-8f3z", title="", command=("train.py",), by="mac", at=0, phase=phase, generation=1,
        version=1, sentence="", machines=("mac", "nas"), code=code, progress=TrainingProgress(step=step),
    )  # fmt: skip
    described = _describe_newer_steps(row, 75)
    assert bool(described) == bool(words)
    assert words in described
    assert not words or "committed 80 steps" in described


def test_files_that_stay_on_their_machine_are_not_looked_for_with_attach() -> None:
    row = RunRow(
        run="train-8f3z", title="", command=("train.py",), by="mac", at=0, phase="ended", generation=1,
        version=1, sentence="", machines=("mac",), code=0, progress=TrainingProgress(step=80),
    )  # fmt: skip
    stay = PartRow(name="mac", stage="ended", words="the results stay in /x on mac: they are too large")
    described = _describe_newer_steps(row, 75, (stay,))
    assert described.endswith(f"in what the script saved: {stay.words}")
    lack = replace(stay, words="the results lack out/checkpoint-100 (2 GiB)")
    assert described != _describe_newer_steps(row, 75, (lack,))
    assert _describe_newer_steps(row, 75, (lack,)).endswith("barnraise attach train-8f3z")


@pytest.fixture(scope="module")
def machine() -> Iterator[tuple[Machine, str]]:
    """Yield a machine that has trained an adapter, and the name of that run."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("peft", reason="needs peft")
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "oak", BARNRAISE_DISCOVERY_METHODS="")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(machine.room / "llama")
        (machine.room / "llama" / "tokenizer.json").write_text("{}")
        project = machine.room / "project"
        project.mkdir()
        (project / "train.py").write_text(SCRIPT.replace("FOLDER", str(machine.room / "llama")))
        with machine.typing("up") as agent:
            agent.until(lambda: _answers(machine), "the agent answers")
            words = ("--folder", str(project), str(project / "train.py"))
            machine.type("run", *words, patience_s=PATIENCE_S)
            (results,) = (project / "barnraise-runs").iterdir()
            yield machine, results.name


def _answers(machine: Machine) -> bool:
    try:
        machine.type("status")
    except AssertionError:  # it has not started
        return False
    return True


def exported(machine: Machine, run: str, *words: str) -> tuple[Path, str]:
    """Return the folder that was written, and the output of the command."""
    folder = machine.room / f"out{len(words)}{''.join(words[:1])}"
    return folder, machine.type("export", run, str(folder), *words, patience_s=PATIENCE_S)


def outputs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_adapter_of_the_last_step_is_that_which_the_script_saved(machine: tuple[Machine, str]) -> None:
    ours, run = machine
    folder, output = exported(ours, run, "--adapter")
    assert "adapter_model.safetensors is the adapter after 4 steps of run" in output
    (saved,) = ours.room.glob("project/barnraise-runs/*/tuned")
    expected = load_file(saved / "adapter_model.safetensors")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert any("lora_A" in name for name in tensors)
    assert json.loads((folder / "run.json").read_text())["steps"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("words", [(), ("--base", "llama")], ids=["of-the-adapter", "given"])
def test_merged_model_computes_what_base_and_adapter_compute(
    machine: tuple[Machine, str], words: tuple[str, ...]
) -> None:
    import peft
    import transformers

    ours, run = machine
    folder, output = exported(ours, run, "--merged", *words)
    assert "is the base model with the adapter after 4 steps of run" in output
    adapter = next(ours.room.glob("project/barnraise-runs/*/tuned"))
    base = transformers.LlamaForCausalLM.from_pretrained(ours.room / "llama")
    before = outputs(base)
    expected = outputs(peft.PeftModel.from_pretrained(base, adapter))
    merged = outputs(transformers.LlamaForCausalLM.from_pretrained(folder))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, expected)
    assert (folder / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_trained_part_is_written_without_the_base(machine: tuple[Machine, str]) -> None:
    ours, run = machine
    folder, output = exported(ours, run)
    assert "The frozen base (" in output
    names = load_file(folder / "model.safetensors")
    assert all("lora_" in name or "lm_head" in name for name in names)
