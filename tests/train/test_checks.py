import pytest

from conf import UserError
from train.checks import check_ranks


def test_ranks_with_different_settings_are_refused() -> None:
    """One rank read a YAML before it was edited, the other after: they saved at different steps, and hung."""
    check_ranks([{"steps": 4, "save_every": 2}] * 3)
    with pytest.raises(
        UserError, match="save_every: wanted the same on every rank, found 2 on rank 0 and 3 on rank 1"
    ):
        check_ranks([{"steps": 4, "save_every": 2}, {"steps": 4, "save_every": 3}])
