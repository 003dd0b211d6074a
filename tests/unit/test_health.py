"""What `r3.doctor --fast` says about machines that differ, are busy or do not share a disk."""

from dataclasses import replace
from typing import Any

import pytest

from r3.tools import Facts, findings

WELL = Facts(
    host="n1",
    device="NVIDIA H100 0",
    in_use_gib=1.5,
    versions={"torch": "2.13.0", "NCCL": "2.28.9"},
    ring=10.0,
    ring_gib_s=20.0,
    clock_s=0.0,
    disk_problem="",
    folder="/shared/runs",
    free_gib=500.0,
)
# Two machines of two ranks each; the sum of rank + 1 is 10.
RANKS = [
    replace(WELL, host=f"n{1 + rank // 2}", device=f"NVIDIA H100 {rank % 2}") for rank in range(4)
]


def test_equal_machines_have_no_problem() -> None:
    found = findings(RANKS)
    assert not any(each.problems for each in found)
    texts = {each.name: each.text for each in found}
    assert texts["devices"] == "4 x NVIDIA H100 on 2 machine(s), 1.5 GiB in use"
    assert texts["disk"] == "/shared/runs is shared, 500.0 GiB are free"
    assert texts["ring"] == "20.00 GiB/s all-reduced on the slowest rank"


def test_one_rank_is_compared_with_nothing_and_has_no_figures_of_it() -> None:
    found = findings([replace(WELL, ring=1.0, device="CPU 0", in_use_gib=0.0)])
    assert not any(each.problems for each in found)
    texts = {each.name: each.text for each in found}
    assert texts.pop("versions")
    assert texts == {
        "devices": "1 x CPU on 1 machine(s)",
        "ring": "one rank: nothing to compare",
        "disk": "/shared/runs can be written, 500.0 GiB are free",
        "clocks": "one machine",
    }


@pytest.mark.parametrize(
    ("check", "wrong", "text"),
    [
        ("devices", {"device": "NVIDIA A100 1"}, "rank 3 on n2 has NVIDIA A100 1, rank 0 has"),
        ("devices", {"in_use_gib": 30.2}, "rank 3 on n2: 30.2 GiB of NVIDIA H100 1 are in use"),
        ("ring", {"ring": 9.0}, "rank 3 on n2 received a sum of 9, not 10"),
        ("ring", {"ring": float("nan")}, "received a sum of nan"),
        ("disk", {"disk_problem": "/shared is not that of rank 0"}, "rank 3 on n2: /shared is not"),
        ("clocks", {"clock_s": -7.5}, "the clock of n2 differs by -7.5 s from that of n1"),
        ("versions", {"versions": {"torch": "2.12.0", "NCCL": "2.28.9"}}, "torch is 2.12.0 on n2"),
        ("versions", {"versions": {"torch": "2.13.0"}}, "NCCL is missing on n2 and 2.28.9 on n1"),
    ],
)
def test_a_machine_that_differs_is_named(check: str, wrong: dict[str, Any], text: str) -> None:
    found = findings([*RANKS[:-1], replace(RANKS[-1], **wrong)])
    problems = {each.name: each.problems for each in found}
    assert [name for name, each in problems.items() if each] == [check]
    (said,) = problems[check]
    assert text in said
