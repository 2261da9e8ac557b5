import torch

from train.monitor.drafts import sample_drafts


def test_the_widest_windows_are_shown_with_what_decoding_knows() -> None:
    """The trunk is 0..5; a_1 of the wide window stands at position 2, so that token 2 is known."""
    batch = {
        "ids": torch.tensor([[0, 1, 2, 3, 4, 5, 9, 9, 9]]),
        "positions": torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2, 3]]),
        "offsets": torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 2]]),
        "labels": torch.tensor([[1, 2, 3, 4, 5, -100, 2, 3, 4]]),
    }
    predicted = torch.tensor([[1, 2, 3, 4, 5, -100, 7, 3, 8]])

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    assert sample_drafts(batch, predicted, count=1, decode=decode) == [("0 1 2", "3 8", "3 4", 1)]
    rows = sample_drafts(batch, predicted, count=9, decode=decode)
    assert rows[1] == ("0 1", "7", "2", 0) and len(rows) == 2
