"""What infer.speed leaves out or refuses, and that it does so before a model is read."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf import UserError, settings
from infer.speed import SpeedConfig
from infer.speed import run as speed
from infer.speed.models import prepare
from tests.infer.speed.conftest import Main

SHORT = ("temperatures=[0]", "decoders=[]", "base=null", "draft=null")


def test_another_text_in_the_same_file_is_another_result(run: Main, tmp_path: Path) -> None:
    """The file was known by its name: a changed one gave the old figures, and half of a run went on with it."""
    run(*SHORT)
    path = tmp_path / "texts.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("Reader", "Writer"), encoding="utf-8")
    with pytest.raises(UserError, match="already contains a result with inputs.prompts.mine=.*; requested"):
        run(*SHORT)


def test_a_set_that_the_model_cannot_read_is_left_out(
    run: Main, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Infillings of a model without infilling ended the run of all sets."""
    plain = shutil.copytree(model_dir, tmp_path / "plain")
    described = json.loads((plain / "adaptive.json").read_text())
    (plain / "adaptive.json").write_text(json.dumps({**described, "infilling": None}))
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "def one():\n    return 1\n\n\none()\n"}))
    requested = [f"model={plain}", *SHORT, f"prompts.middle.path={tmp_path / 'code.jsonl'}"]
    requested += ["prompts.middle.kind=lines", "prompts.middle.count=1"]
    report = run(*requested)
    (skipped,) = report["skipped"]
    assert skipped["prompt_set"] == "middle" and "trained for infilling" in skipped["reason"]
    assert {row["prompt_set"] for row in report["rows"]} == {"mine"} and report["units"]["all"] == 3
    assert "speed: middle is left out: infill needs a model" in capsys.readouterr().out
    assert "trained for infilling" in (tmp_path / "report" / "index.html").read_text()
    with pytest.raises(UserError, match="prompts.middle: infill needs a model trained for infilling"):
        run(*requested, "~prompts.mine")


def test_a_folder_that_cannot_be_had_is_reported_before_a_model_is_read(
    run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of all dtypes were loaded first, for minutes; and other threads could not be helped by threads=N,
    a setting that itself was another.
    """
    pool = SimpleNamespace(lms={}, peers=SimpleNamespace(left_out={}))
    monkeypatch.setattr(speed, "ModelPool", None)
    monkeypatch.setattr(speed, "header", lambda *args, **kwargs: {})
    place = tmp_path / "report" / "speed"
    place.mkdir(parents=True)
    (place / "mine.txt").write_text("")
    with pytest.raises(UserError, match="must be a new or empty folder, got other files"):
        run()
    (place / "mine.txt").unlink()
    with pytest.raises(TypeError):  # it comes to the models, and leaves nothing where it was only looked
        run()
    assert list((tmp_path / "report").iterdir()) == [place]
    monkeypatch.setattr(speed, "ModelPool", lambda *args, **kwargs: pool)
    monkeypatch.setattr(speed, "Worker", lambda *args: print(1 / 0))
    used = torch.get_num_threads()
    try:
        for threads, error in (
            ("null", "zero"),
            (used + 1, f"got {used + 1}: give threads={used}"),
            (used, "zero"),
        ):
            with pytest.raises((UserError, ZeroDivisionError), match=error):
                run(f"threads={threads}")
    finally:
        torch.set_num_threads(used)


def test_diverse_tokens_allow_no_more_drafts_than_there_are(
    given: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """launch/evaluate.sh asks for the k of the paper's figures, of which SDSAT-D has up to L."""
    diverse = shutil.copytree(model_dir, tmp_path / "diverse")
    described = json.loads((diverse / "adaptive.json").read_text())
    described["adaptive_ids"] = [described["adaptive_ids"][0] + n for n in range(3)]
    (diverse / "adaptive.json").write_text(json.dumps(described))
    requested = [*given, f"model={diverse}", "base=null", "draft=null"]
    assert prepare(settings("speed", SpeedConfig, [*requested, "k=[1,3,5]"])).k == [1, 3]
    with pytest.raises(UserError, match="k must be 1 to 3 adaptive tokens, got 5"):
        prepare(settings("speed", SpeedConfig, [*requested, "k=[5,7]"]))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("base=absent", "base=absent must be a Transformers model directory, got no such directory"),
        ("base=OTHER", "base=.*OTHER must have the token ids of the model, whose id .* is .*, got"),
        ("model=BASE", "got no adaptive.json"),
        ("max_new_tokens=600", "max_new_tokens must be at most 500 for texts/. of .* context of 512, got 600"),
        ("prompts.mine.max_new_tokens=600", "prompts.mine.max_new_tokens must be at most 500"),
        ("decoders=[medusa]", "decoders must be some of sdsat, adaptive, auto, .*, gsd, got medusa"),
        ("dtypes=[]", "dtypes must be some of .*, got none"),
        ("k=[2,99]", "k must be below max_new_tokens=12, got 99"),  # no draft was so deep: a row of others
        ("k=[0]", "k must be numbers of adaptive tokens from 1 on, got"),
        ("temperatures=[-1]", "temperatures must be from 0 on, got"),
        ("batches=[9]", "batches must be numbers from 1 to 8, got"),
        ("temperatures=[1,1]", "temperatures must have each value once, got"),
        ("max_new_tokens=1", "max_new_tokens must be at least 2, got 1"),
        ("top_p=0", "top_p must be above 0, up to 1, got 0"),
        ("~prompts.mine", "prompts must have a set, got none"),
        ("compile=true", "compile=true: the model must be on a GPU"),
    ],
)
def test_what_cannot_be_measured_is_reported_before_a_folder_is_made(
    run: Main, base_dir: Path, tmp_path: Path, override: str, sentence: str
) -> None:
    other = shutil.copytree(base_dir, tmp_path / "OTHER")  # two pieces have each other's ids
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        run(override.replace("OTHER", str(other)).replace("BASE", str(base_dir)))
    assert not (tmp_path / "report").exists()
