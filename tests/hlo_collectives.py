"""Counts the collectives of a compiled program, and the bytes that they bring in."""

from __future__ import annotations

import math
import re
from collections import Counter

_OPERATION = re.compile(
    r"= (?P<types>.*?) (?P<name>all-gather|all-to-all|all-reduce|reduce-scatter|"
    r"collective-permute|ragged-all-to-all|all-gather-start|all-reduce-start|"
    r"collective-permute-start)\("
)
_TYPE = re.compile(r"\b(?P<kind>[a-z]+)(?P<bits>\d+)\w*\[(?P<shape>[\d,]*)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(?P<sizes>.*?)\] \{(?P<axes>.*?)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{(?P<first>[\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]")


def _group_size(line: str) -> int:
    if found := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found["sizes"]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", found["axes"]))
    if found := _LISTED_GROUPS.search(line):
        return len(found["first"].split(","))
    found = _IOTA_GROUPS.search(line)
    assert found, line
    return int(found["size"])


def collectives(hlo: str | None) -> list[tuple[str, int, int]]:
    """Lists name, devices of a group, and bytes of the result, in order."""
    found = []
    for line in (hlo or "").splitlines():
        match = _OPERATION.search(line)
        if match:
            size = sum(
                math.prod(int(n) for n in part["shape"].split(",") if n)
                * int(part["bits"])
                // 8
                for part in _TYPE.finditer(match["types"])
            )
            name = match["name"].removesuffix("-start")
            found.append((name, _group_size(line), size))
    return found


def counts(hlo: str | None) -> dict[str, int]:
    """Counts the collectives by name."""
    return dict(Counter(name for name, _, _ in collectives(hlo)))


def bytes_received(name: str, group: int, size: int) -> int:
    """Says what one device takes in, by the usual ring algorithms."""
    return {
        "all-gather": size * (group - 1) // group,
        "all-to-all": size * (group - 1) // group,
        "reduce-scatter": size * (group - 1),
        "all-reduce": 2 * size * (group - 1) // group,
    }[name]


def total_received(hlo: str | None) -> int:
    """Adds up what one device takes in."""
    return sum(bytes_received(*collective) for collective in collectives(hlo))
