"""The graph of a profile, as a table for the terminal and as a file."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import networkx as nx
from rich.markup import escape
from rich.table import Table

from ckptplan.core.profile import Profile
from ckptplan.core.units import format_bytes

LISTED_STAGES = 3  # a storage that more stages need is listed with the first, the last and their number


def graph_table(profile: Profile) -> Table:
    """Return a table with one line per stage and set of stages that need its storages."""
    graph = profile.graph()
    table = Table(
        "stage",
        "needed by",
        "",
        title=f"{len(profile.stages)} stages, {len(profile.storages)} storages",
        caption="itself: what the stage keeps for its own backward; skip: passes stages that don't need it\n"
        "branch: several stages may hold it until backward; crossing: made so far and still needed",
    )
    for column in ("storages", "bytes", "crossing"):
        table.add_column(column, justify="right")
    inputs = [node for node in graph if node[0] == "storage" and not graph.in_degree(node)]
    makers = [("(inputs)", inputs, "")]
    for i, nbytes in enumerate(crossing_bytes(profile, graph)):
        makers.append((profile.stages[i].name, list(graph["stage", i]), format_bytes(nbytes)))
    for name, made, crossing in makers:
        sizes: dict[tuple[str, str], Counter[str]] = {}
        for node in made:
            line = sizes.setdefault(_needed_by(graph, node), Counter())
            line.update(storages=1, nbytes=graph.nodes[node]["nbytes"])
        sizes.pop(("", ""), None)
        lines = sorted(sizes.items(), key=lambda item: item[0][0] != "itself")
        for (needed_by, mark), line in lines or [(("–", ""), Counter())]:
            size = (str(line["storages"]), format_bytes(line["nbytes"])) if line else ("", "")
            table.add_row(escape(name), escape(needed_by), mark, *size, crossing)
            name = crossing = ""
    return table


def _needed_by(graph: nx.DiGraph, node: tuple[str, int]) -> tuple[str, str]:
    """Return the names of what needs a storage, and its marks; empty if nothing does."""
    edges = [(graph.nodes[stage]["name"], edge) for stage, edge in graph[node].items()]
    if not edges:
        kept = any("keep" in edge["held_by"] for *_, edge in graph.in_edges(node, data=True))
        return "itself" if kept else "the caller" if graph.nodes[node]["to_end"] else "", ""
    holders = [name for name, edge in edges if edge["held_by"]]
    passes = max(edge["passes"] for _, edge in edges)
    marks = [f"skip past {passes}"] if passes and graph.in_degree(node) else []
    marks += [f"branch to {len(holders)}"] if len(holders) > 1 else []
    if len(holders) > LISTED_STAGES:
        holders = [f"{holders[0]} .. {holders[-1]} ({len(holders)})"]
    # Variables always outlive the call that they are arguments of, so that isn't listed.
    variables = [name for name, edge in edges if not edge["held_by"] and (edge["passes"] or not holders)]
    return ", ".join(holders + [f"program until {name}" for name in variables]), ", ".join(marks)


def crossing_bytes(profile: Profile, graph: nx.DiGraph) -> list[int]:
    """Return, per stage, the bytes that it and earlier ones make and later ones need, without what the caller keeps."""
    changes = [0] * len(profile.stages)
    for s, storage in enumerate(profile.storages):
        if storage.born >= 0 and graph["storage", s] and not storage.to_end:
            changes[storage.born] += storage.nbytes
            changes[max(i for _, i in graph["storage", s])] -= storage.nbytes
    return list(accumulate(changes))
