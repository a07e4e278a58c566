"""The graph of stages and storages: hand-checked, against every option of random profiles, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.report.graph import crossing_bytes, graph_table

pytestmark = pytest.mark.planning

PROFILES = Path(__file__).parents[1] / "profiles"
X, A, SKIP, H, Y, Z, OUT = range(7)


def small_profile() -> Profile:
    """A block that is called twice, beside a skip; what the glue makes goes to both calls."""
    storages = (
        Storage("x", 8, -1, -1, to_end=True),
        Storage("a", 40, 0, 0),
        Storage("skip", 20, 0, 4),
        Storage("h", 10, 1, 3),
        Storage("y", 6, 2, 3),
        Storage("z", 7, 3, 4),
        Storage("out", 5, 4, 5, to_end=True),
    )

    def stage(name: str, saved: tuple[int, ...], inputs: tuple[int, ...], linked: tuple[int, ...] = ()) -> Stage:
        again = Option("recompute", inputs, (), 0, 0, 1.0, recomputes=True)
        keep = Option("keep", saved, (), 100 if name == "block#2" else 0, 0)
        menu = (keep,) if name.startswith("(") else (keep, again)
        return Stage(name, name, menu, 1.0, 2.0, linked=linked)

    return Profile(
        stages=(
            stage("down", (X, A), (X,)),
            stage("(before block)", (SKIP,), ()),
            stage("block", (H,), (H,)),
            stage("block#2", (H, Y), (H, Y), (Y,)),
            stage("up", (SKIP,), (SKIP, Z), (SKIP, Z)),
            stage("(after up)", (), ()),
        ),
        storages=storages,
        base_forward_bytes=(8,) * 6,
        base_backward_bytes=(8,) * 6,
        update_peak_bytes=8,
        link=Link(1.0, 1.0),
    )


def test_a_skip_a_branch_a_shared_block_and_glue() -> None:
    graph = small_profile().graph()
    stages = {node: data for node, data in graph.nodes.items() if node[0] == "stage"}
    assert [data["name"] for data in stages.values()] == [stage.name for stage in small_profile().stages]
    assert [data["module"] for data in stages.values()][2:4] == ["block", "block"]
    assert [data["is_glue"] for data in stages.values()] == [False, True, False, False, False, True]
    assert stages["stage", 0] == {
        "bipartite": 0, "name": "down", "module": "down", "kind": "down", "is_glue": False, "forward_s": 1.0,
        "backward_s": 2.0,
    }  # fmt: skip
    assert graph.nodes["storage", SKIP] == {
        "bipartite": 1, "name": "skip", "nbytes": 20, "born": 0, "program_until": 4, "to_end": False, "stays": False,
        "on_host": False, "origin": "",
    }  # fmt: skip
    made = {(i, s): data["held_by"] for (what, i), (_, s), data in graph.edges(data=True) if what == "stage"}
    assert made == {(0, A): ("keep",), (0, SKIP): (), (1, H): (), (2, Y): (), (3, Z): (), (4, OUT): ()}
    both = ("keep", "recompute")

    def needs(held_by: tuple[str, ...], *, linked: bool = False, program: bool = False, passes: int = 0) -> Any:
        return {"held_by": held_by, "linked": linked, "program": program, "passes": passes}

    needed = {(s, i): data for (what, s), (_, i), data in graph.edges(data=True) if what == "storage"}
    assert needed == {
        (X, 0): needs(both),
        (SKIP, 1): needs(("keep",)),
        (SKIP, 4): needs(both, linked=True, program=True, passes=2),
        (H, 2): needs(both),
        (H, 3): needs(both, program=True),
        (Y, 3): needs(both, linked=True, program=True),
        (Z, 4): needs(("recompute",), linked=True, program=True),
        (OUT, 5): needs((), program=True),
    }


def test_a_traced_transformer_is_a_chain() -> None:
    profile = Profile.load(PROFILES / "transformer.json")
    graph = profile.graph()
    chain = nx.bipartite.projected_graph(graph, [("stage", i) for i in range(len(profile.stages))])
    names = nx.relabel_nodes(chain, dict(graph.nodes(data="name")))
    layers = [f"layers.{i}" for i in range(4)]
    assert nx.dag_longest_path(names) == ["(before layers.0)", *layers, "(after layers.3)"]
    assert not any(passes for *_, passes in graph.edges(data="passes"))
    # Between two layers only the boundary is there.
    boundary = next(storage.nbytes for storage in profile.storages if storage.name == "layers.0/24")
    assert crossing_bytes(profile, graph) == [boundary] * 4 + [2 * boundary, 0]


def test_the_table_marks_skips_and_branches() -> None:
    cells = [list(column.cells) for column in graph_table(small_profile()).columns]
    assert list(zip(*cells, strict=True)) == [
        ("(inputs)", "down", "", "1", "8 B", ""),
        ("down", "itself", "", "1", "40 B", "20 B"),
        ("", "(before block), up", "skip past 2, branch to 2", "1", "20 B", ""),
        ("(before block)", "block, block#2", "branch to 2", "1", "10 B", "30 B"),
        ("block", "block#2", "", "1", "6 B", "36 B"),
        ("block#2", "up", "", "1", "7 B", "27 B"),
        ("up", "program until (after up)", "", "1", "5 B", "0 B"),
        ("(after up)", "–", "", "", "", "0 B"),
    ]
