"""python -m infer.speed on a tiny model: what is written, who does it, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from conf import UserError, settings
from infer.api import Model
from infer.config import DecodeConfig, InferConfig
from infer.speed import run as speed
from infer.speed.aggregate import ORDER, read
from infer.speed.bench import Own
from infer.speed.config import PEERS, SpeedConfig
from infer.speed.prepare import prepare
from infer.speed.units import PLAIN, Way
from infer.speed.ways import ways
from infer.speed.work import Worker

COLUMNS = {
    *("prompt_set", "dtype", "temperature", "decoder", "k", "peer", "prompts", "rounds", "tokens", "forwards"),
    *("tokens_per_second", "tokens_per_second_quartiles", "speedup", "speedup_interval", "speedup_quartiles"),
    *("speedup_whole", "first_ms", "acceptance_rate", "acceptance_by_position", "tokens_per_forward"),
    *("rows_per_forward", "ms_per_forward", "ms_draft", "ms_forward", "ms_rest", "drafted", "drafted_nodes"),
    *("graph_success", "peak_memory_bytes", "limit_share", "identical", "compared", "exact"),
}
Main = Callable[..., dict[str, Any]]


@pytest.fixture
def given(model_dir: Path, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two texts, one round, one decoder of each kind."""
    monkeypatch.setattr("infer.speed.device.SECONDS", 0.01)
    texts = ["def first(n):\n    return n", "import json\n\nclass Reader:\n"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [
        f"model={model_dir}",
        f"base={base_dir}",
        "draft=self:1",
        f"out={tmp_path / 'report'}",
        "prompts=null",
        f"prompts.mine.path={tmp_path / 'texts.jsonl'}",
        "prompts.mine.key=text",
        "prompts.mine.count=2",
        "k=[2]",
        "temperatures=[0,1]",
        "dtypes=[float32]",
        "decoders=[sdsat,auto,prompt_lookup,ssd,gsd]",
        "peers=[]",
        "rounds=1",
        "max_new_tokens=12",
        "tracker.mode=disabled",
    ]


@pytest.fixture
def run(given: list[str], tmp_path: Path) -> Main:
    """Runs with further settings, and returns speed.json."""

    def main(*overrides: str) -> dict[str, Any]:
        speed.run(settings("speed", SpeedConfig, [*given, *overrides]))
        return json.loads((tmp_path / "report" / "speed" / "speed.json").read_text(encoding="utf-8"))

    return main


def test_peers_run_beside_ours_and_one_that_cannot_be_is_named(
    run: Main, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why was told by the log alone: a report said nothing of a peer that was asked for."""
    report = run("decoders=[]", "peers=[generate,prompt_lookup,assisted,vllm]")
    peers = [row for row in report["rows"] if row["peer"]]
    assert [row["decoder"] for row in peers] == 2 * list(PEERS.values())[:3]
    for row in peers:
        assert row["compared"] == 2 and row["exact"] == (row["identical"] == 2)
        assert row["exact"] or row["temperature"] > 0
        assert row["forwards"] > 0 and row["rows_per_forward"] >= 1 and row["peak_memory_bytes"] != 0
    assert caplog.messages == ["peers: vllm is left out: wanted vLLM, found it not installed"]
    assert report["left_out"] == [{"peer": "vllm", "reason": "wanted vLLM, found it not installed"}]
    assert "left out: vllm: wanted vLLM" in capsys.readouterr().out
    page = (Path(report["settings"]["out"]) / "index.html").read_text(encoding="utf-8")
    assert "<dt>vllm</dt><dd>wanted vLLM, found it not installed</dd>" in page


def test_a_report_has_a_row_for_every_way(run: Main, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    report = run()
    assert report["schema"] == 2 and report["units"] == {"all": 3, "done": 3} and report["ranks"] == 1
    decoders = ["plain", "sdsat", "auto", "prompt lookup", "ssd", "gsd", "base"]
    rows = report["rows"]
    assert [row["decoder"] for row in rows] == 2 * decoders and set(decoders) < set(ORDER)
    for row in rows:
        assert row.keys() >= COLUMNS
        assert row["exact"] == (row["decoder"] != "base") and row["identical"] == row["compared"]
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0 and row["limit_share"] > 0
        assert (row["prompts"], row["rounds"]) == (2, 1)
    (limit,) = report["limits"]
    assert limit["copy_bytes_per_second"] > 0 and report["costs"][0]["rows"][0] == 1
    assert "gsd" in capsys.readouterr().out
    texts = {"".join(text for _, text in sample["pieces"]) for sample in report["samples"]}
    assert len(report["samples"]) == 6 and len(texts) == 1
    kinds = {kind for sample in report["samples"] for kind, _ in sample["pieces"]}
    assert kinds <= {"own", "drafted", "shared"}
    run()
    assert "nothing to do" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_with_what_is_missing(
    run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, real = [], Worker.__call__

    def killed(self: Worker, unit: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(unit.name)
        return real(self, unit)

    monkeypatch.setattr(Worker, "__call__", killed)
    short = ("temperatures=[0]", "decoders=[sdsat]", "base=null", "draft=null")
    with pytest.raises(KeyboardInterrupt):
        run(*short)
    partial = tmp_path / "report" / ".speed.partial"
    assert read(partial)["units"] == {"all": 3, "done": 1}
    assert {row["decoder"] for row in read(partial)["rows"]} == {"plain", "sdsat"}
    begun = (partial / "units" / "mine-000-00000.json").read_bytes()
    done.clear()
    monkeypatch.setattr(Worker, "__call__", lambda self, unit: done.append(unit.name) or real(self, unit))
    with pytest.raises(UserError, match="holds a result with rounds=1, now asked for with rounds=2"):
        run(*short, "rounds=2")
    report = run(*short)
    assert done == ["mine-000-00001", "mine-look"] and report["units"]["done"] == 3
    assert (tmp_path / "report" / "speed" / "units" / "mine-000-00000.json").read_bytes() == begun
    assert not partial.exists()


def test_another_text_in_the_same_file_is_another_result(run: Main, tmp_path: Path) -> None:
    """The file was known by its name: a changed one gave the old figures, and half of a run went on with it."""
    short = ("temperatures=[0]", "decoders=[]", "base=null", "draft=null")
    run(*short)
    path = tmp_path / "texts.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("Reader", "Writer"), encoding="utf-8")
    with pytest.raises(UserError, match="holds a result with inputs.prompts.mine=.*, now asked for with"):
        run(*short)


def test_a_set_that_the_model_cannot_read_is_left_out(
    run: Main, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Infillings of a model without infilling ended the run of all sets."""
    plain = shutil.copytree(model_dir, tmp_path / "plain")
    described = json.loads((plain / "adaptive.json").read_text())
    (plain / "adaptive.json").write_text(json.dumps({**described, "infilling": None}))
    asked = [f"model={plain}", "base=null", "draft=null", "decoders=[]", "temperatures=[0]"]
    (tmp_path / "code.jsonl").write_text(json.dumps({"text": "def one():\n    return 1\n\n\none()\n"}))
    asked += [f"prompts.middle.path={tmp_path / 'code.jsonl'}", "prompts.middle.kind=lines"]
    asked += ["prompts.middle.count=1"]
    report = run(*asked)
    (skipped,) = report["skipped"]
    assert skipped["prompt_set"] == "middle" and "trained for infilling" in skipped["reason"]
    assert {row["prompt_set"] for row in report["rows"]} == {"mine"} and report["units"]["all"] == 3
    assert "speed: middle is left out: infill: wanted a model" in capsys.readouterr().out
    assert "trained for infilling" in (tmp_path / "report" / "index.html").read_text()
    with pytest.raises(UserError, match="prompts.middle: infill: wanted a model trained for infilling"):
        run(*asked, "~prompts.mine")


def test_the_longest_prompt_warms_up_too(run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes were captured in a counted run, which the median of two rounds does not pass over."""
    ids, texts = [], ["x", "y", "def long(n):\n    return n + 1\n", "z"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    turn, real = Worker._turn, Own.decoder

    def noted(self: Own, seed: int) -> Any:
        return lambda prompt: (ids.append(len(prompt.ids)), real(self, seed)(prompt))[1]

    def begun(self: Worker, *args: Any) -> Any:
        found = turn(self, *args)
        ids.append(None)
        return found

    monkeypatch.setattr(Own, "decoder", noted)
    monkeypatch.setattr(Worker, "_turn", begun)
    run("temperatures=[0]", "decoders=[]", "base=null", "draft=null", "prompts.mine.count=4")
    first = ids[: ids.index(None)]
    assert max(first) == max(one for one in ids if one) and len(first) in (2, 3)


def test_a_folder_that_cannot_be_had_is_told_before_a_model_is_read(
    run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of all dtypes were loaded first, for minutes; and other threads could not be helped by threads=N,
    a setting that itself was another.
    """
    monkeypatch.setattr(speed, "Bench", None)
    monkeypatch.setattr(speed, "header", lambda *args, **kwargs: {})
    place = tmp_path / "report" / "speed"
    place.mkdir(parents=True)
    (place / "mine.txt").write_text("")
    with pytest.raises(UserError, match="wanted a new or empty folder, found other files"):
        run()
    (place / "mine.txt").unlink()
    with pytest.raises(TypeError):  # it comes to the models, and leaves nothing where it was only looked
        run()
    assert list((tmp_path / "report").iterdir()) == [place]
    monkeypatch.setattr(
        speed, "Bench", lambda *args, **kwargs: SimpleNamespace(lms={}, peers=SimpleNamespace(left_out={}))
    )
    monkeypatch.setattr(speed, "_do", lambda *args: print(1 / 0))
    with pytest.raises(ZeroDivisionError):
        run()
    used, other = torch.get_num_threads(), 1 + torch.get_num_threads()
    try:
        with pytest.raises(UserError, match=rf"begun with, found {other}: give threads={used}, choose"):
            run(f"threads={other}")
        with pytest.raises(ZeroDivisionError):
            run(f"threads={used}")
    finally:
        torch.set_num_threads(used)


def test_a_lossy_decoder_fails_the_run_and_every_later_one(
    run: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is written before the check, and the second run said "nothing to do" and succeeded."""
    real = Worker.__call__

    def spoiled(self: Worker, unit: Any) -> Any:
        found = real(self, unit)
        for group in found.get("groups", []):
            for record in (record for block in group["blocks"] for record in block):
                record["text"] += "x" * (record["decoder"] == "sdsat")
        return found

    monkeypatch.setattr(Worker, "__call__", spoiled)
    short = ("temperatures=[0]", "decoders=[sdsat]", "base=null", "draft=null")
    for _ in range(2):
        with pytest.raises(UserError, match="float32 outputs: wanted all identical .* sdsat k=2 on mine"):
            run(*short)
        assert (tmp_path / "report" / "speed" / "manifest.json").is_file()
        monkeypatch.setattr(speed, "measure", None)


def test_a_draft_model_with_adaptive_tokens_drafts_in_both_ways(run: Main, model_dir: Path) -> None:
    report = run(f"draft={model_dir}", "draft.adaptive=true", "temperatures=[0]", "decoders=[gsd]", "base=null")
    assert [row["decoder"] for row in report["rows"]] == ["plain", "gsd", "gsd probes"]
    assert all(row["exact"] for row in report["rows"])


def test_diverse_tokens_allow_no_more_drafts_than_there_are(
    given: list[str], model_dir: Path, tmp_path: Path
) -> None:
    """launch/evaluate.sh asks for the k of the paper's figures, of which SDSAT-D has up to L."""
    diverse = shutil.copytree(model_dir, tmp_path / "diverse")
    described = json.loads((diverse / "adaptive.json").read_text())
    described["adaptive_ids"] = [described["adaptive_ids"][0] + n for n in range(3)]
    (diverse / "adaptive.json").write_text(json.dumps(described))
    asked = [*given, f"model={diverse}", "base=null", "draft=null"]
    assert prepare(settings("speed", SpeedConfig, [*asked, "k=[1,3,5]"])).k == [1, 3]
    with pytest.raises(UserError, match="k: wanted 1 to 3 adaptive tokens, found 5"):
        prepare(settings("speed", SpeedConfig, [*asked, "k=[5,7]"]))


def other_tokenizer(folder: Path, base_dir: Path) -> Path:
    shutil.copytree(base_dir, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    Tokenizer.from_file(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["base=absent"], "base=absent: wanted a Transformers model directory, found no such directory"),
        (["base=OTHER"], "base=.*OTHER: wanted the token ids of the model, whose id .* is .*, found"),
        (["model=BASE"], "found no adaptive.json"),
        (
            ["max_new_tokens=600"],
            r"max_new_tokens=600: wanted texts/. of prompts.mine .* context of 512, found .* \+ 600",
        ),
        (["prompts.mine.path=absent"], "prompts.mine.path=absent: wanted"),
        (
            ["decoders=[medusa]"],
            "decoders: wanted some of sdsat, auto, prompt_lookup, ssd, tsd, gsd, found medusa",
        ),
        (["peers=[llama]"], "peers: wanted some of generate, prompt_lookup, assisted, vllm, found llama"),
        (["dtypes=[int8]"], "dtypes: wanted some of float32, bfloat16, float16, found int8"),
        (["dtypes=[]"], "dtypes: wanted some of .*, found none"),
        (["k=[2,99]"], "k: wanted below max_new_tokens=12, found 99"),  # no draft was so deep: a row of others
        (["k=[0]"], "k: wanted numbers of adaptive tokens from 1 on, found"),
        (["temperatures=[-1]"], "temperatures: wanted some from 0 on, found"),
        (["temperatures=[1,1]"], "temperatures: wanted each once, found"),
        (["rounds=0"], "rounds: wanted at least 1, found 0"),
        (["max_new_tokens=1"], "max_new_tokens: wanted at least 2, found 1"),
        (["~prompts.mine"], "prompts: wanted at least one set, found none"),
        (["compile=true"], "compile=true: wanted the model on a GPU"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_folder_is_made(
    run: Main, base_dir: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    if overrides == ["base=OTHER"]:
        other_tokenizer(tmp_path / "OTHER", base_dir)
    named = {"OTHER": str(tmp_path / "OTHER"), "BASE": str(base_dir)}
    for name, folder in named.items():
        overrides = [one.replace(name, folder) for one in overrides]
    with pytest.raises(UserError, match=sentence):
        run(*overrides)
    assert not (tmp_path / "report").exists()


def test_sampled_sdsat_is_the_nucleus_preset(given: list[str]) -> None:
    """What the report measures is what `decode=nucleus` gives."""
    config = settings("speed", SpeedConfig, [*given, "k=[5]", "temperatures=[0.2]"])
    asked = ["model=m", "prompt=x", "decode=nucleus", "decode.max_new_tokens=12"]
    assert ways(config, 0.2)[Way("sdsat", 5)] == settings("infer", InferConfig, asked).decode
    greedy = ways(config, 0.0)
    assert greedy[PLAIN] == DecodeConfig("plain", max_new_tokens=12)
    assert greedy[Way("sdsat", 5)] == DecodeConfig("sdsat", k=5, probes="root", max_new_tokens=12)
    assert Way("tsd") not in greedy and Way("gsd probes") not in greedy
