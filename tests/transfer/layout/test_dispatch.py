from __future__ import annotations

import numpy as np
import pytest

from weightcast.transfer.errors import AgreementError
from weightcast.transfer.layout.dispatch import audit_dispatch, audit_shared_dispatch
from weightcast.transfer.layout.placement import ExpertPlacement

PLACEMENT = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 0, 1]]), 4, 2)


def table(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def test_every_entry_points_at_its_expert() -> None:
    audit_dispatch(PLACEMENT, table())
    audit_dispatch(PLACEMENT, table((0, 0, 0), (0, 0, 5), (0, 3, 3), (0, 3, 4), (1, 1, 2), (1, 1, 5)))
    # Past the map slots hold p % 4.
    audit_dispatch(PLACEMENT, table((7, 0, 4), (7, 3, 3)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            (0, 0, 4),
            r"layer 0: .* expert 0 to physical slot 4 \(EP rank 1, local slot 1\), which holds logical expert 3",
        ),
        (
            (1, 0, 0),
            r"layer 1: .* expert 0 to physical slot 0 \(EP rank 0, local slot 0\), which holds logical expert 3",
        ),
        ((7, 0, 5), r"layer 7: .* which holds logical expert 1 by the placement; 1 such entries"),
        ((0, 4, 0), r"layer 0: .* logical expert 4 to physical slot 0, expected experts 0\.\.3 and slots 0\.\.5"),
        ((0, 0, 6), r"physical slot 6, expected"),
        ((0, 0, -1), r"physical slot -1, expected"),
        ((0, -1, 0), r"logical expert -1 to"),
        ((-1, 0, 0), r"layer -1: "),
    ],
)
def test_wrong_entries(row: tuple[int, int, int], message: str) -> None:
    with pytest.raises(AgreementError, match=message):
        audit_dispatch(PLACEMENT, table((0, 1, 1), row))


def test_shared_tables() -> None:
    same = table((0, 0, 0), (0, 1, 1), (0, 1, 2))
    audit_shared_dispatch({})
    audit_shared_dispatch({0: same, 1: same[::-1], 2: table((1, 0, 0)), 3: table()})
    with pytest.raises(
        AgreementError,
        match=r"layer 0, logical expert 1: .*rank 3 may choose physical slots \[1\], that of rank 0 \[1, 2\]",
    ):
        audit_shared_dispatch({0: same, 3: same[:2]})
    with pytest.raises(
        AgreementError, match=r"layer 0, logical expert 2: .*rank 1 may choose .* \[3\], that of rank 0 \[\]"
    ):
        audit_shared_dispatch({0: same, 1: np.concatenate([same, table((0, 2, 3))])})
