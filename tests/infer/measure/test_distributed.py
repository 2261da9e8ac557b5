"""Units of work: what is left of them, and who does it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conf import RankLocalError, UserError
from conf.stage import BEGUN
from infer.measure.distributed import UnitStore, WorkerGroup, folder

ALONE = WorkerGroup(0, 1, 0)
MADE = {"settings": {"x": 1}, "inputs": {}}


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out, names = tmp_path / "out", ["a", "b", "c"]
    with pytest.raises(KeyboardInterrupt), folder(out, MADE, ALONE) as partial:
        units = UnitStore(partial / "units", names)
        assert units.open(ALONE) == names
        units.save("b", {"value": 2})
        raise KeyboardInterrupt
    assert not out.exists()
    with folder(out, MADE, ALONE) as partial:
        units = UnitStore(partial / "units", names)
        assert units.open(ALONE) == ["a", "c"] and units.read() == {"b": {"value": 2}}
    assert (out / "units" / "b.json").is_file()


def test_what_other_settings_left_is_refused_and_stays(tmp_path: Path) -> None:
    out, other = tmp_path / "out", {"settings": {"x": 2}, "inputs": {}}
    with pytest.raises(KeyboardInterrupt), folder(out, MADE, ALONE) as partial:
        UnitStore(partial, ["a"]).save("a", {"n": 1})
        raise KeyboardInterrupt
    message = "already contains an unfinished run with x=1; requested x=2"
    with pytest.raises(UserError, match=message), folder(out, other, ALONE):
        pass
    assert UnitStore(partial, ["a"]).read() == {"a": {"n": 1}}
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="must be a new or empty folder"), folder(tmp_path, MADE, ALONE):
        pass


def test_every_unit_has_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, "wait", lambda self: None)
    names = [str(n) for n in range(7)]
    shares = [UnitStore(tmp_path, names).open(WorkerGroup(rank, 3, rank)) for rank in range(3)]
    assert sorted(sum(shares, [])) == names and {len(share) for share in shares} == {2, 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_that_one_rank_meets_is_reported_by_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only the first rank of a machine tells what all meet: a benchmark ended without a word by any other."""
    monkeypatch.setattr(WorkerGroup, "wait", lambda self: None)
    with (
        pytest.raises(RankLocalError, match="must be memory"),
        folder(tmp_path / "out", MADE, WorkerGroup(rank, 2, rank)),
    ):
        raise UserError("model must be memory, got none")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda data: data.replace(b"12", b"13"), lambda data: b""]
)
def test_a_damaged_unit_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    """Half of a record was a JSONDecodeError when all was done; one with another digit was another figure."""
    units = UnitStore(tmp_path, ["a", "b"])
    for name in units.open(ALONE):
        units.save(name, {"seconds": 0.125})
    assert units.open(ALONE) == []
    file = tmp_path / "a.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"a.json must be whole, got a file that .*: the run does it again"):
        units.read()
    assert UnitStore(tmp_path, ["a", "b"]).open(ALONE) == ["a"]
    assert "it is done again" in capsys.readouterr().out
    units.save("a", {"seconds": 0.5})
    assert units.read() == {"a": {"seconds": 0.5}, "b": {"seconds": 0.125}}


def test_a_damaged_record_of_what_was_begun(tmp_path: Path) -> None:
    """It was a JSONDecodeError."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), folder(out, MADE, ALONE) as partial:
        raise KeyboardInterrupt
    (partial / BEGUN).write_text("{")
    (partial / "work").touch()
    with pytest.raises(UserError, match="begun.json must be a JSON object, got"), folder(out, MADE, ALONE):
        pass


@pytest.mark.parametrize("count", [0, 2, 3, 7])
def test_shares_are_gathered_in_the_order_of_all(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Ranks may have shares of different lengths, or none."""
    ranks = [WorkerGroup(rank, 3, rank) for rank in range(3)]
    shares = [item.share(range(count)) for item in ranks]
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda out, item: out.__setitem__(slice(None), shares)
    )
    assert all(item.gather(share) == list(range(count)) for item, share in zip(ranks, shares))
    assert WorkerGroup(0, 1, 0).gather("abc") == ["a", "b", "c"]
