"""The picture of who waits for whom."""

from __future__ import annotations

import math

import plotly.graph_objects as go
import pytest

from labkit.charts.wait_graph import ALARM, CALM, LONGEST, OVER, RADIUS_PX, wait_graph


def ring(size: int) -> list[tuple[int, int, str]]:
    return [(rank, (rank + 1) % size, f"recv(src={(rank + 1) % size}, tag=0)") for rank in range(size)]


def all_waiting(size: int) -> dict[int, str]:
    return dict.fromkeys(range(size), "waiting")


def discs(figure: go.Figure) -> dict[str, tuple[float, float]]:
    trace = figure.data[0]
    return dict(zip(trace.text, zip(trace.x, trace.y, strict=True), strict=True))


def arrows(figure: go.Figure) -> list[go.layout.Annotation]:
    return [note for note in figure.layout.annotations if note.showarrow]


def labels(figure: go.Figure) -> list[go.layout.Annotation]:
    return [note for note in figure.layout.annotations if not note.showarrow]


def nearest(figure: go.Figure, x: float, y: float) -> str:
    return min(discs(figure).items(), key=lambda item: math.dist(item[1], (x, y)))[0]


def box(note: go.layout.Annotation) -> tuple[float, float, float, float]:
    """Left, bottom, right and top of a label, for letters of 7 by 16 pixels."""
    lines = note.text.split("<br>")
    wide, high = 7.0 * max(map(len, lines)), 16.0 * len(lines)
    left = {"left": note.x, "right": note.x - wide, "center": note.x - wide / 2}[note.xanchor]
    bottom = {"bottom": note.y, "top": note.y - high, "middle": note.y - high / 2}[note.yanchor]
    return left, bottom, left + wide, bottom + high


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12])
def test_every_rank_has_an_arrow_from_it_to_the_one_it_waits_for(size: int) -> None:
    figure = wait_graph(ring(size), all_waiting(size), range(size))
    drawn = {(nearest(figure, note.ax, note.ay), nearest(figure, note.x, note.y)) for note in arrows(figure)}
    assert drawn == {(str(rank), str((rank + 1) % size)) for rank in range(size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12])
def test_nothing_lies_on_top_of_another_and_all_is_inside(size: int) -> None:
    call = "x" * 60
    figure = wait_graph([(rank, (rank + 1) % size, call) for rank in range(size)], all_waiting(size))
    places = list(discs(figure).values())
    boxes = [box(note) for note in labels(figure)]
    assert len(boxes) == size
    for index, (left, bottom, right, top) in enumerate(boxes):
        for other in boxes[index + 1 :]:
            assert right <= other[0] or other[2] <= left or top <= other[1] or other[3] <= bottom
        for x, y in places:
            closest = (min(max(x, left), right), min(max(y, bottom), top))
            assert math.dist(closest, (x, y)) >= RADIUS_PX
        (x0, x1), (y0, y1) = figure.layout.xaxis.range, figure.layout.yaxis.range
        assert x0 <= left and right <= x1 and y0 <= bottom and top <= y1
    for index, place in enumerate(places):
        assert all(math.dist(place, other) > 2 * RADIUS_PX for other in places[index + 1 :])


def test_ranks_go_clockwise_from_the_top() -> None:
    at = discs(wait_graph([], all_waiting(4)))
    assert at["0"][1] > at["1"][1] > at["2"][1]
    assert at["1"][0] > at["0"][0] > at["3"][0]


def test_two_ranks_that_wait_for_each_other_get_two_arrows_apart() -> None:
    one, other = arrows(wait_graph(ring(2), all_waiting(2), (0, 1)))
    assert abs(one.y - other.y) >= 8


def test_the_cycle_is_red_and_those_who_left_are_grey() -> None:
    figure = wait_graph([*ring(2), (2, 0, "barrier()"), (2, 3, "barrier()")],
                        {0: "waiting", 1: "waiting", 2: "waiting", 3: "finished"}, (0, 1))  # fmt: skip
    assert list(figure.data[0].marker.color) == [ALARM, ALARM, "#FFFFFF", OVER]
    assert [note.arrowcolor for note in arrows(figure)] == [ALARM, ALARM, CALM, CALM]
    assert [note.text for note in labels(figure)] == [
        "recv(src=1, tag=0)",
        "recv(src=0, tag=0)",
        "barrier()",
        "finished",
    ]


def test_a_long_call_is_cut_and_stands_whole_in_the_hover_text() -> None:
    call = "all_reduce(sum, float32, shape (450000,))"
    figure = wait_graph([(0, 1, call), (0, 2, call)], {0: "waiting", 1: "computing", 2: "finished"})
    shown = labels(figure)[0].text
    assert shown.endswith("…")
    assert len(shown) <= LONGEST
    assert figure.data[0].hovertext[0] == f"rank 0: waiting<br>waits for 1, 2 in {call}"


def test_what_a_program_wrote_is_shown_as_text_and_not_as_markup() -> None:
    figure = wait_graph([(0, 1, "<b>x</b>")], all_waiting(2), title="<i>t</i>")
    assert labels(figure)[0].text == "&lt;b&gt;x&lt;/b&gt;"
    assert "<b>" not in figure.data[0].hovertext[0]
    assert figure.layout.title.text == "&lt;i&gt;t&lt;/i&gt;"


def test_many_calls_of_one_rank_are_counted() -> None:
    figure = wait_graph([(0, other, f"irecv(src={other})") for other in (1, 2, 3)], all_waiting(4))
    assert labels(figure)[0].text == "irecv(src=1)<br>irecv(src=2)<br>and 1 more"


@pytest.mark.parametrize("size", [16, 32])
def test_more_ranks_than_fit_on_a_circle_are_all_drawn_apart(size: int) -> None:
    hub = 5
    figure = wait_graph([(rank, hub, "barrier()") for rank in range(size) if rank != hub], all_waiting(size))
    places = list(discs(figure).values())
    assert len(places) == size
    assert len(arrows(figure)) == size - 1
    assert min(math.dist(a, b) for i, a in enumerate(places) for b in places[:i]) > 2 * RADIUS_PX


def test_a_rank_that_waits_for_itself_has_no_arrow_but_its_call() -> None:
    figure = wait_graph([(0, 0, "send(dst=0, tag=0)")], {0: "waiting"}, (0,))
    assert not arrows(figure)
    assert labels(figure)[0].text == "send(dst=0, tag=0)"


def test_no_ranks_give_an_empty_picture() -> None:
    assert not wait_graph([], {}).data[0].x
