"""Picture of a run in the output of a notebook cell."""

from __future__ import annotations

import msgspec

from barnraise.display.notebook.picture import draw_picture, plain_text, waiting_picture
from barnraise.history.view_builder import build_view
from benchmarks.invented_run import RUN, example_run
from tests.unit.display.hostile_run import ATTACK, hostile_run, html_tags

TAGS = {"div", "style", "p", "strong", "img", "table", "thead", "tbody", "tr", "th", "td"}


def test_picture_says_the_state_and_the_figures() -> None:
    view = build_view(example_run(200), run=RUN)
    text = draw_picture(view)
    assert "2 of 3 machines train; nas is paused: its link slows the others" in text
    assert "step 200 of 600" in text
    assert text.count("<img ") == 2
    assert plain_text(view).startswith("train.py: 2 of 3 machines train")


def test_old_picture_is_not_shown_as_live() -> None:
    view = build_view(example_run(200), run=RUN)
    assert "nothing new" not in draw_picture(view)
    late = msgspec.structs.replace(view, at=view.at + 120)
    assert "nothing new for 2 min" in draw_picture(late)
    assert "Not up to date: the agent is away" in draw_picture(view, "the agent is away")


def test_style_of_the_picture_does_not_leave_it() -> None:
    style = draw_picture(build_view(example_run())).partition("<style>")[2].partition("</style>")[0]
    assert ":root" not in style


def test_hostile_names_stay_text() -> None:
    for text in (draw_picture(build_view(hostile_run())), waiting_picture(ATTACK, ATTACK)):
        tags = html_tags(text)
        assert {tag for tag, _ in tags} <= TAGS
        assert {name for _, names in tags for name in names} <= {"class", "src", "alt", "scope"}
        assert len(text) < 500_000
