"""`barnraise plan` as it is typed, and what it shows: text, one JSON object, a picture."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.agent_client.profile import MeasuredStep, StepProfile
from barnraise.agent_client.run_requests import GraphResponse
from barnraise.cli.main import main
from barnraise.cli.plan import plan as planning
from barnraise.cli.plan.options import PlanOptions
from barnraise.cli.plan.parse import parse_count
from barnraise.cli.plan.picture import picture
from barnraise.cli.plan.text import PlanReport, describe, shown_plans
from barnraise.core.errors import ConfigError
from barnraise.planning import ModelSize, PlanLimits, StepTimes, advise, make_plans
from barnraise.topology import Device, LinkFacts, Machine, NodeFacts, build_graph
from barnraise.topology.graph import encode_graph
from tests.unit.planning.clusters import clusters, mesh

IMAGINED = ("--add", "4090@1gbit", "--add", "3090@1gbit")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["barnraise", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def answer_of(speeds: list[float], mbps: float = 940.0, parameters: int = 10_000_000) -> PlanReport:
    cluster, model, profile = mesh(speeds, mbps), ModelSize(parameters=parameters), StepTimes(batch=512)
    return PlanReport(
        model=model,
        profile=profile,
        basis="given",
        sync="exact",
        machines=cluster.members,
        links=cluster.paths,
        ranking=make_plans(cluster, model, profile),
        advice=advise(cluster, model, profile),
    )


# what is shown


def test_plan_table_starts_with_chosen_plan() -> None:
    answer = answer_of([100.0, 60.0, 5.0])
    text = describe(answer, 100)
    rows = [line for line in text.splitlines() if re.match(r"[* ] {2}[0-9]", line)]
    assert rows[0].startswith("*")
    assert "chosen" in rows[0]
    assert answer.ranking.chosen.name.partition(":")[0] in rows[0]
    assert any("m00 alone" in row and "1.00x" in row for row in rows)
    assert all("with --sync auto" in row for row in rows if "+" in row)
    assert any("with --sync auto" in row for row in rows)
    assert "Chosen: " in text
    for advice in answer.advice:
        assert advice.sentence in " ".join(text.split())


def test_prose_fits_the_terminal() -> None:
    text = describe(answer_of([100.0, 60.0]), 70)
    prose = text[text.index("Chosen: ") :]
    assert max(map(len, prose.splitlines())) < 70


def test_dry_run_step_is_shown_beside_prediction() -> None:
    answer = answer_of([100.0, 60.0])
    tried = msgspec.structs.replace(
        answer, together=("m00", "m01"), measured_step_s=4.0, predicted_step_s=3.5
    )
    assert "with m00 and m01: 4 s a step; the speeds and links alone predicted 3.5 s." in " ".join(
        describe(tried).split()
    )
    assert "dry run" not in describe(answer)


@settings(deadline=None, max_examples=30)
@given(clusters())
def test_pictures_are_xml_and_their_bars_are_the_phases(cluster: object) -> None:
    model, profile = ModelSize(parameters=5_000_000), StepTimes(batch=64)
    ranking = make_plans(cluster, model, profile, PlanLimits())  # type: ignore[arg-type]
    answer = msgspec.structs.replace(answer_of([1.0]), ranking=ranking, model=model, profile=profile)
    root = ElementTree.fromstring(picture(answer))
    shown = shown_plans(answer)
    groups = root.findall(f"{SVG}g")
    assert len(groups) == len(shown.allowed) + len(shown.others)
    right = float(root.get("width", "0"))
    for group in groups:
        bars = [bar for bar in group.findall(f"{SVG}rect") if bar.get("class") != "rail"]
        ends = [float(bar.get("x", "")) + float(bar.get("width", "")) for bar in bars]
        assert ends == sorted(ends)
        assert max(ends) < right
        # Name, figures and the whole step each have a place of their own.
        places = [(text.get("x"), text.get("y")) for text in group.findall(f"{SVG}text")]
        assert len(set(places)) == 3


def test_machine_names_cannot_break_the_picture() -> None:
    answer = answer_of([100.0, 60.0])
    chosen = msgspec.structs.replace(answer.ranking.chosen, name="<b>&\x1b[31m" + "x" * 300)
    ranking = msgspec.structs.replace(answer.ranking, plans=(chosen,), chosen=chosen, best_alone=chosen)
    text = picture(msgspec.structs.replace(answer, ranking=ranking))
    names = [element.text or "" for element in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert any(name.startswith("<b>&?[31m") for name in names)
    assert max(map(len, names)) < 160


# what is typed


def test_imagined_machines_need_no_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.svg"
    words = ("--parameters", "124M", "--batch", "512", "--tokens", "1024", *IMAGINED)
    assert run(monkeypatch, "plan", *words, "--picture", str(file)) == 0
    out = capsys.readouterr().out
    assert out.startswith("124M parameters, 473 MiB of gradients; batches of 512 samples")
    assert "3090@1gbit and 4090@1gbit: every step, a ring, exact" in out
    assert f"The picture is in {file}." in out
    assert ElementTree.parse(file).getroot().tag == f"{SVG}svg"


def test_json_is_one_object_with_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "--parameters", "1B", "--sync", "auto", *IMAGINED, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["parameters"] == 10**9
    assert report["sync"] == "auto"
    assert report["ranking"]["chosen"] in report["ranking"]["plans"]
    assert {"what", "times", "sentence"} == set(report["advice"][0])


def test_levels_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "levels.toml"
    file.write_text('[inside]\nall_reduce = "star"\n')
    assert run(monkeypatch, "plan", "--parameters", "1M", *IMAGINED, "--levels", str(file), "--json") == 0
    plans = json.loads(capsys.readouterr().out)["ranking"]["plans"]
    assert {plan["way"] for plan in plans} <= {"star", "none"}


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["--parameters", "many"], "--parameters 'many'", "--parameters 124M"),
        (["--parameters", "0"], "--parameters '0'", "--parameters 124M"),
        (["--parameters", "1M", "--batch", "-3"], "--batch '-3'", "--batch 512"),
        (["--parameters", "1M", "--tokens", "1 k k"], "--tokens '1 k k'", "--tokens 1024"),
        (["--parameters", "1M", "--flops-per-sample", "fast"], "'fast'", "--flops-per-sample 760G"),
        (
            ["--parameters", "1M", "--seconds-per-sample", "0"],
            "'0' is not a time",
            "--seconds-per-sample 12ms",
        ),
        (["--parameters", "1M", "--add", "4090"], "'4090' does not describe a machine", "4090@1gbit"),
        (["--parameters", "1M", "--add", "9999@1gbit"], "speed is not known", "4090"),
        (["--parameters", "1M", "--levels", "no.toml"], "no.toml cannot be read", "[inside]"),
        (
            ["--parameters", "1M", *IMAGINED, "--picture", "no/where.svg"],
            "no/where.svg",
            "--picture plan.svg",
        ),
        (["--parameters", "1M"], "no agent runs", "--add 4090@1gbit"),
        (["--parameters", "1M", "--on", "mac", *IMAGINED], "no agent runs", "barnraise up --detach"),
    ],
)
def test_wrong_words_end_in_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
    hint: str,
) -> None:
    assert run(monkeypatch, "plan", *words) == 1
    sentence, arrow, action = capsys.readouterr().err.partition("  -> ")
    assert arrow
    assert problem in sentence
    assert hint in action


def test_plan_without_size_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan") == 2
    assert "--parameters" in capsys.readouterr().err


def test_plan_options_without_dry_run_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    assert run(monkeypatch, "run", "--picture", "p.svg", "train.py") == 1
    assert "barnraise run --dry-run" in capsys.readouterr().err
    (tmp_path / "levels.toml").write_text('[inside]\nall_reduce = "rign"\n')
    assert run(monkeypatch, "run", "--levels", "levels.toml", "train.py") == 1
    assert "Did you mean 'ring'?" in capsys.readouterr().err, "before anything is sent"
    (tmp_path / "levels.toml").write_text('[inside]\ncodec = "powersgd"\n')
    assert run(monkeypatch, "run", "--sync", "auto", "--levels", "levels.toml", "train.py") == 1
    assert "unknown codec 'powersgd'" in capsys.readouterr().err, "which only a script can ask for"
    assert run(monkeypatch, "run", "--dry-run", "--detach", "train.py") == 1
    assert "Leave out --detach" in capsys.readouterr().err
    assert run(monkeypatch, "run", "--dry-run", "train.py") == 1
    shown = capsys.readouterr().err
    assert "train.py does not train in a session" in shown
    assert "barnraise plan --parameters" in shown


@pytest.mark.parametrize(
    ("text", "count"),
    [("124M", 124_000_000), ("1.3b", 1_300_000_000), ("7e9", 7 * 10**9), ("10_000", 10_000)],
)
def test_counts_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text, "--parameters", "124M") == count


@settings(deadline=None)
@given(st.text(max_size=12))
def test_typed_text_is_a_count_or_an_error(text: str) -> None:
    try:
        count = parse_count(text, "--batch", "512")
    except ConfigError:
        return
    assert 1 <= count <= 10**15


# from what the agent and a dry run have measured


def machine(tflops: float | None) -> Machine:
    device = Device("cpu", 0, "cpu", 16 << 30, tflops)
    return Machine(
        os="Linux",
        os_version="",
        arch="x86_64",
        cpu_name="",
        cores=8,
        memory_bytes=16 << 30,
        python="",
        torch=None,
        barnraise="",
        devices=(device,),
    )


NODES = {name: f"{place:064x}" for place, name in enumerate(("mac", "pc", "pi"))}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that has measured mac and pc, and their link; of pi nothing is known but that it is there."""
    figures = {"mac": 2.0, "pc": 1.0, "pi": None}
    facts = [NodeFacts(node=node, name=name, machine=machine(figures[name])) for name, node in NODES.items()]
    link = LinkFacts(a=NODES["mac"], b=NODES["pc"], rtt_s=0.0004, mbps=940.0)
    graph = encode_graph(build_graph(facts, [link]))

    def told(question: object, expected: type[object], **_: object) -> GraphResponse:
        wanted = getattr(question, "on", ()) or tuple(NODES)
        return GraphResponse(graph=graph, nodes=tuple(NODES[name] for name in wanted), this=NODES["mac"])

    monkeypatch.setattr(planning, "ask", told)


@pytest.mark.usefixtures("agent")
def test_this_machines_speed_tells_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--parameters", "1M", "--seconds-per-sample", "10ms", "--json")
    assert run(monkeypatch, "plan", *words) == 0
    report = json.loads(capsys.readouterr().out)
    speeds = {machine["name"]: machine["samples_per_s"] for machine in report["machines"]}
    assert speeds == pytest.approx({"mac": 100.0, "pc": 50.0})
    assert any("pi is left out" in note for note in report["ranking"]["notes"])
    assert run(monkeypatch, "plan", *words, "--on", "pc") == 0
    (alone,) = json.loads(capsys.readouterr().out)["machines"]
    assert (alone["name"], alone["samples_per_s"]) == ("pc", pytest.approx(50.0))


@pytest.mark.usefixtures("agent")
def test_machines_that_nothing_is_known_of_are_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "--parameters", "1M", "--on", "pi") == 1
    shown = capsys.readouterr().err
    assert "these machines have not been measured yet: pi" in shown
    assert "--seconds-per-sample" in shown


def worker(name: str, speed: float, *, is_warm: bool = True) -> MeasuredStep:
    return MeasuredStep(
        node=NODES[name],
        device="cpu",
        samples=1000,
        seconds=1000 / speed,
        is_warm=is_warm,
        optimizer_s=0.01,
    )


@pytest.mark.usefixtures("agent")
def test_profile_gives_machine_speeds_and_calibrates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = StepProfile(
        parameters=1_000_000,
        gradient_bytes=8_000_000,
        frozen_bytes=0,
        is_lora=False,
        batch=64,
        unit=4,
        workers=(
            worker("mac", 100.0),
            worker("mac", 60.0),
            worker("pc", 80.0),
            worker("pi", 20.0, is_warm=False),
        ),
        steps_s=(2.0, 1.0, 0.4, 0.4, 0.4, 0.4),
    )
    assert planning.run_measured(profile, on=(), wishes=PlanOptions(as_json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    speeds = {machine["name"]: machine["samples_per_s"] for machine in report["machines"]}
    assert speeds == pytest.approx({"mac": 160.0, "pc": 80.0, "pi": 20.0})
    assert (report["model"]["wire_bytes"], report["profile"]["unit"]) == (8.0, 4)
    assert report["measured_step_s"] == 0.4
    assert report["is_calibrated"]
    plan_of_all = next(
        plan for plan in report["ranking"]["plans"] if len(plan["parts"]) == 3 and plan["is_exact"]
    )
    assert abs(plan_of_all["step_s"] - 0.4) < abs(report["predicted_step_s"] - 0.4)
    notes = " ".join(report["ranking"]["notes"])
    assert "Of pi only the first step was measured" in notes
    assert "The link between mac and pi was not measured" in notes


def test_plan_with_long_names_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = answer_of([100.0, 90.0, 80.0, 70.0])
    long = {machine.name: f"{machine.name}-in-the-attic-of-my-parents" for machine in answer.machines}
    machines = tuple(msgspec.structs.replace(machine, name=long[machine.name]) for machine in answer.machines)
    text = describe(msgspec.structs.replace(answer, machines=machines))
    assert max(map(len, text.splitlines())) <= 80
