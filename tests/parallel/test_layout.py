"""How `parallel` is read, and who is where."""

from __future__ import annotations

import pytest

from tokenmill.errors import ConfigError
from tokenmill.parallel.layout import Layout, parse_layout


@pytest.mark.parametrize(
    "text, layout",
    [
        (None, Layout()),
        ("", Layout()),
        ("tp2", Layout(tp=2)),
        (" tp2, pp3", Layout(tp=2, pp=3)),
        ("ep4", Layout(tp=4, ep=4)),
        ("tp2,dp2,ep4", Layout(tp=2, dp=2, ep=4)),
    ],
)
def test_a_layout_is_read(text: str | None, layout: Layout) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize("text", ["tp", "tp0", "tp2,tp2", "xp2", "2", "tp-1", "tp2;pp2", "tp2,ep3", "tp99999"])
def test_what_is_no_layout_is_refused_in_a_sentence_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel is '.*'; .*"):
        parse_layout(text)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=3), Layout(tp=2, pp=2, dp=3, ep=6)])
def test_every_rank_has_a_place_of_its_own_and_agrees_with_its_peers_about_groups(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert len(set(places)) == layout.ranks
    assert places == sorted(places)
    for rank in range(layout.ranks):
        stage, data, _ = places[rank]
        same_stage = [one for one in range(layout.ranks) if places[one][0] == stage]
        assert list(layout.stage_group(rank)) == same_stage
        assert list(layout.tensor_group(rank)) == [one for one in same_stage if places[one][1] == data]
