"""What is listed works: every published layout by every ability."""

from __future__ import annotations

import re

import pytest

from tests.matrix import cells
from tests.matrix.results import CELLS, column_of
from tests.published import LAYOUTS

pytestmark = pytest.mark.e2e


def cases() -> list[object]:
    return [
        pytest.param(
            name,
            cell,
            id=f"{cell}-{name.rpartition('/')[2]}",
            marks=[
                pytest.mark.xdist_group(name),
                *([] if cell in LAYOUTS[name].diagonal else [pytest.mark.matrix]),
            ],
        )
        for cell in CELLS
        for name in LAYOUTS
    ]


@pytest.mark.parametrize(("name", "cell"), cases())
def test_cell(name: str, cell: str, record_property: pytest.RecordProperty) -> None:
    run, limit = getattr(cells, cell), LAYOUTS[name].limits.get(cell)
    record_property("cell", (name, column_of(cell), "refused" if limit else "passed"))
    if limit is None:
        run(name)
        return
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        run(name)
    assert re.search(limit.said, str(caught.value)), caught.value
