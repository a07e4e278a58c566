"""The graph of stages and storages, described at `Profile.graph`."""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from ckptplan.core.profile import Profile


def graph_of(profile: Profile) -> nx.DiGraph:
    """`Profile.graph`; O(stages + what their options hold)."""
    graph = nx.DiGraph()
    held_by: list[dict[int, list[str]]] = [{} for _ in profile.storages]
    for i, stage in enumerate(profile.stages):
        graph.add_node(
            ("stage", i),
            bipartite=0,
            name=stage.name,
            module=stage.name.partition("#")[0],
            kind=stage.kind,
            is_glue=stage.is_glue,
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
        )
        for option in stage.options:
            for s in option.held:
                held_by[s].setdefault(i, []).append(option.name)
    modules = list(accumulate((not stage.is_glue for stage in profile.stages), initial=0))  # in front of each stage
    for s, storage in enumerate(profile.storages):
        node, holders = ("storage", s), held_by[s]
        known = {name: value for name, value in dataclasses.asdict(storage).items() if value is not None}
        graph.add_node(node, bipartite=1, **known)
        if storage.born >= 0:
            graph.add_edge(("stage", storage.born), node, held_by=tuple(holders.pop(storage.born, ())))
        last = min(storage.program_until, len(profile.stages) - 1)
        passed = modules[storage.born + 1]
        for i in sorted({*holders, last} - {storage.born}):
            graph.add_edge(
                node,
                ("stage", i),
                held_by=tuple(holders.get(i, ())),
                linked=s in profile.stages[i].linked,
                program=i == last,
                passes=modules[i] - passed,
            )
            passed += not profile.stages[i].is_glue
    return graph
