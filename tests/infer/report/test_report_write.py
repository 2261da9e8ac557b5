"""python -m infer.report: what lies in the folder afterwards, what the terminal shows, and what is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from conf import UserError, run, settings
from conf.files import with_checksum
from conf.tracker import TrackerConfig
from infer import measure
from infer.report.__main__ import ReportConfig, main
from infer.report.plots import PLOTS
from infer.report.rows import KEY
from infer.report.summary import headline, sentence
from infer.report.terminal import print_report
from infer.report.write import build, write
from tests.infer.report import report_fixture as fixture
from tests.messages import error


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """As `python -m infer.report` with these arguments."""
    monkeypatch.setattr("sys.argv", ["infer.report", *map(str, arguments), "tracker.mode=disabled"])
    run("report", ReportConfig, main)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the error of the command."""
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, *arguments)
    assert ended.value.code == 2
    return error(capsys.readouterr().err)


def single(**settings: Any) -> dict[str, Any]:
    """speed.json of one prompt set, greedy."""
    return fixture.speed(sets=("humaneval",), **{"temperatures": (0.0,), **settings})


def built(folder: Path, speed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the report of one prompt set, and its best row."""
    report = build(fixture.write_parts(folder, speed=speed))
    (best,) = report["summary"]["best"]
    return report, best


def lines(text: str) -> str:
    """Printed text without its line breaks, which come where the terminal ends."""
    return " ".join(text.split())


def test_one_folder_holds_all_of_it(tmp_path: Path, monkeypatch, capsys) -> None:
    fixture.write_parts(tmp_path, speed=fixture.speed(), quality=fixture.quality())
    command(monkeypatch, f"out={tmp_path}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["schema"] == 2 and report["speed"]["schema"] == 4 and report["quality"]["schema"] == 1
    with (tmp_path / "speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report["speed"]["rows"]) == 3 * 3 * 19
    assert float(rows[1]["speedup_interval_low"]) < float(rows[1]["speedup"])
    assert len(rows[2]["acceptance_by_position"].split()) == 3  # of k=3
    with (tmp_path / "quality.csv").open() as file:
        assert {row["metric"] for row in csv.DictReader(file)} == {"pass@1", "pass@10", "exact match"}
    pictures = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert pictures.keys() == PLOTS.keys() - {"training"}
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
    assert not list(tmp_path.glob(".*"))  # no part of a file is left
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines()[:-1])) <= 80
    assert (
        "generate+lookup †" in printed
        and "gsd ≠" in printed
        and "bfloat16, sampled at temperature 0.2" in printed
    )
    assert f"report: {tmp_path / 'index.html'}" in printed


def test_the_sentence_names_the_fastest_exact_decoder(tmp_path: Path, capsys) -> None:
    """gsd is made the fastest, but in bfloat16 one of its texts is another."""
    report, best = built(tmp_path, fixture.faster(single(), 9, "gsd"))
    assert (best["label"], best["exact"], best["peer"]) == ("sdsat", True, "vllm")
    rows = {row["decoder"]: row for row in report["speed"]["rows"]}
    assert best["over_peer"] == pytest.approx(rows["auto"]["speedup"] / rows["vllm"]["speedup"])
    print_report(report)
    printed = lines(capsys.readouterr().out)
    assert f"sdsat in bfloat16 is {rows['auto']['speedup']:.2f}x plain decoding (95 %: " in printed
    assert "7b/model with drafts (sdsat) on humaneval: greedy, " in printed
    assert "The texts are the same, token for token." in printed
    assert "texts: gsd (at worst 19 of 20 the same, humaneval, greedy)" in printed


def test_plain_decoding_is_not_held_against_itself(tmp_path: Path, capsys) -> None:
    """ "20/20" of plain decoding was of its own first run; and no line said why sdsat's forwards give less."""
    print_report(write(fixture.write_parts(tmp_path, speed=single())))
    output, page = capsys.readouterr().out, (tmp_path / "index.html").read_text(encoding="utf-8")
    (plain,) = (line for line in output.splitlines() if line.split()[:1] == ["plain"])
    assert "/20" not in plain and "20/20" in output and page.count(">20/20<") == output.count("20/20")
    assert "tokens by forward count both" in lines(output) and "tokens by forward count both" in page


@pytest.mark.parametrize(("temperature", "message"), [(0.0, ")"), (1.0, ", which sampled other texts)")])
def test_a_peer_is_not_beaten_within_the_noise(tmp_path: Path, temperature: float, message: str) -> None:
    """ "1.50x the fastest peer" was a ratio of two noisy figures, without a word on their intervals."""
    speed = single(temperatures=(temperature,))
    for row in (row for row in speed["rows"] if row["peer"]):
        row["speedup_interval"] = [0.5, 9.0]
    report, best = built(tmp_path, speed)
    assert best["over_peer"] is None
    assert f"no clear difference from the fastest peer (vllm{message}" in sentence(best)
    assert "decoders (vllm) is not clearly slower or faster" in report["summary"]["sentence"]


def test_a_wide_interval_is_not_the_best(tmp_path: Path) -> None:
    """Two prompts gave prompt lookup 1.77 (1.01 to 4.52), and auto, 1.62 (1.40 to 1.84), lost to it."""
    speed = single(peers=False)
    lookup = next(row for row in speed["rows"] if row["decoder"] == "prompt lookup")
    lookup |= {"speedup": 9.0, "speedup_interval": [1.01, 20.0]}
    assert built(tmp_path, speed)[1]["label"] == "sdsat"


def test_without_an_exact_decoder_the_sentence_says_so(tmp_path: Path) -> None:
    speed = single(peers=False)
    for row in speed["rows"]:
        row["exact"], row["identical"] = row["decoder"] == "plain", 5
    report, best = built(tmp_path, speed)
    assert not best["exact"] and "Not all texts are the same, token for token." in report["summary"]["sentence"]


def test_a_slower_type_is_held_against_plain_decoding_in_the_fastest(tmp_path: Path) -> None:
    speed = single(dtypes=("bfloat16", "float32"))
    for row in speed["rows"]:
        row["exact"] = row["dtype"] == "float32"
    _, best = built(tmp_path, speed)
    assert (best["dtype"], best["fastest_plain_dtype"]) == ("float32", "bfloat16")
    assert best["over_fastest_plain"] < best["speedup"]


def test_what_a_reader_must_beware_of(tmp_path: Path) -> None:
    speed = single(dtypes=("float32",), rounds=1, prompts=1, peers=False)
    speed["units"]["done"] = 37
    speed["rows"][1] |= {"identical": 0, "exact": False}
    speed["rows"].append(speed["rows"][0] | {"decoder": "base", "compared": 0, "exact": False})
    quality = fixture.quality()
    quality["same"][0]["identical"] -= 1
    quality["rows"][0]["too_long"] = 3
    report = build(fixture.write_parts(tmp_path, speed=speed, quality=quality))
    assert report["warnings"] == [
        "speed is partial: 37 of 60 units are done",
        "not token for token plain decoding's texts: sdsat (paper) k=1 (at worst 0 of 1 the same, humaneval, "
        "greedy); in float32 they must be",
        "humaneval was measured in one round: its spread is not known",
        "humaneval has a single prompt: its figures are that prompt's",
        "HumanEval Python: sdsat and plain decoding agree in 163 of 164 answers, where all must",
        "prompts that leave no room for an answer in the context count as failed: HumanEval Python 3 of 164 "
        "(model)",
    ]


def test_scores_of_nothing_are_no_headline(tmp_path: Path) -> None:
    quality = fixture.quality()
    for row in (*quality["rows"], *quality["differences"]):
        row |= {"value": 0.0, "interval": [0.0, 0.1]}
    report = build(fixture.write_parts(tmp_path, quality=quality))
    assert not report["summary"]["sentence"]
    assert report["warnings"] == ["no answer passed: these scores cannot tell models apart"]


def test_equal_ends_are_reported_once() -> None:
    """A demo decoded "2 prompt sets at 1.42 to 1.42 times the speed of plain decoding"."""
    row = {"label": "sdsat k=5", "temperature": 0.0, "speedup_interval": [1.2, 1.7], "exact": True, "peer": ""}
    best = [row | {"prompt_set": name, "speedup": ratio} for name, ratio in (("a", 1.418), ("b", 1.421))]
    message = "m with drafts (sdsat k=5) on 2 prompt sets: greedy, 1.42 times as fast as without."
    assert headline("m", best, []).startswith(message)


def test_texts_too_short_for_drafts_are_reported(tmp_path: Path, capsys) -> None:
    """With two new tokens nothing follows the first step: no rate, no acceptance, and still a report."""
    speed = fixture.speed(temperatures=(0.0,))
    names = ("tokens_per_second", "speedup", "speedup_interval", "acceptance_rate", "ms_forward")
    for row in speed["rows"]:
        row |= dict.fromkeys((*names, "ms_per_forward")) | {"acceptance_where_reached": []}
    speed["limits"], speed["costs"], speed["samples"], speed["batches"] = [], [], [], []
    report = write(fixture.write_parts(tmp_path, speed=speed))
    assert report["summary"] == {"model": "7b/model", "sentence": "", "best": [], "scores": []}
    assert not list(tmp_path.glob("*.png"))
    print_report(report)
    assert "The texts were too short for drafts" in capsys.readouterr().out


def test_rows_need_no_more_than_their_names(tmp_path: Path) -> None:
    """What another version does not measure is left out of tables, not a KeyError."""
    speed, remaining = single(peers=False), (*KEY, "prompts", "rounds", "tokens_per_second", "speedup")
    speed["rows"] = [{name: row[name] for name in remaining} for row in speed["rows"]]
    write(fixture.write_parts(tmp_path, speed={name: speed[name] for name in speed if name != "samples"}))
    assert (tmp_path / "index.html").is_file()


def test_a_plot_of_what_is_no_longer_there_goes(tmp_path: Path) -> None:
    speed = single()
    write(fixture.write_parts(tmp_path, speed=speed))
    speed["rows"] = [row for row in speed["rows"] if row["decoder"] != "sdsat"]
    write(fixture.write_parts(tmp_path, speed=speed))
    assert not (tmp_path / "acceptance_rate.png").exists() and (tmp_path / "speedup.png").exists()


def test_weights_and_biases_get_tables_and_images(tmp_path: Path) -> None:
    fixture.write_parts(tmp_path, speed=single(), quality=fixture.quality())
    write(tmp_path, TrackerConfig("offline", "tests"))
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    assert len(list((media / "images").glob("*.png"))) == 6
    tables = [json.loads(path.read_text()) for path in (media / "table").glob("*.json")]
    assert sorted(len(table["data"]) for table in tables) == [19, 35]


def spoiled(folder: Path, kind: str, name: str, text: str) -> None:
    fixture.write_parts(folder, **{kind: getattr(fixture, kind)()})
    (folder / kind / name).write_text(text)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda folder: None, "must be a report's folder, with what infer.speed or infer.quality left in it"),
        (lambda folder: (folder / ".speed.partial").mkdir(), "got neither"),
        (
            lambda folder: spoiled(folder, "speed", "speed.json", '{"schema": 5}'),
            "speed.json must be a speed report of schema 4, got schema 5",
        ),
        (
            lambda folder: spoiled(folder, "speed", "speed.json", '{"schema": 4, "rows": [{"k": 0}]}'),
            "speed.json must have prompt_set in every row, got a row without it",
        ),
        (
            lambda folder: spoiled(folder, "quality", "quality.json", "{"),
            "quality.json must be a JSON object, got",
        ),
        (
            lambda folder: spoiled(folder, "speed", "manifest.json", '{"kind": "study"}'),
            "must be a finished folder of kind 'speed', got kind 'study'",
        ),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, monkeypatch, capsys, prepare, sentence: str) -> None:
    prepare(tmp_path)
    assert sentence in refused(monkeypatch, capsys, f"out={tmp_path}")
    assert not (tmp_path / "report.json").exists()


def test_the_folders_to_compare_are_two() -> None:
    for given in ("a,b", "[a, b]"):
        assert settings("report", ReportConfig, ["out=c", f"compare={given}"]).compared == ["a", "b"]
    for given in ("a", "a,b,c", ","):
        with pytest.raises(UserError, match="compare must be two reports' folders as A,B, got"):
            settings("report", ReportConfig, ["out=c", f"compare={given}"])
    with pytest.raises(UserError, match="training and compare exclude each other"):
        settings("report", ReportConfig, ["out=c", "compare=a,b", "training=d"])


def test_an_unfinished_run_is_reported_as_far_as_it_is(tmp_path: Path) -> None:
    """By the functions that make speed.json and quality.json themselves."""
    header = fixture.speed() | {"all": 60}
    header["settings"] |= {"prompts": {"humaneval": {}}, "dtypes": ["float32"], "temperatures": [0.0]}
    for name in ("schema", "units", "rows", "samples"):
        del header[name]
    (tmp_path / ".speed.partial/units").mkdir(parents=True)
    (tmp_path / ".speed.partial/header.json").write_text(json.dumps(with_checksum(header)))
    report = build(tmp_path)
    assert report["warnings"] == ["speed is partial: 0 of 60 units are done", "no decoder was measured"]


def test_one_way_to_read_the_processors_name() -> None:
    result = measure.hardware()
    assert result["cpu"] == measure.cpu() == (measure.processor() or measure.cpu()) and result["cores"]


def test_a_benchmark_counts_once_in_the_headline() -> None:
    """HumanEval alone, greedy and sampled, pass@1 and pass@10, was reported as three benchmarks."""
    score = {"benchmark": "humaneval", "language": "python", "model": 0.5, "base": 0.5, "interval": [-0.1, 0.1]}
    score["problems"] = 164
    figures = (("pass@1", 0.8, 0.1), ("pass@10", 0.8, 0.2), ("pass@1", 0.0, 0.02))
    scores = [score | dict(zip(("metric", "temperature", "difference"), values)) for values in figures]
    assert headline("m", [], scores) == (
        "Its score is the base model's +2.0 points on 1 benchmark, none of them beyond the difference's 95 % "
        "interval."
    )
    more = [item | {"benchmark": "multipl_e", "language": name} for item in scores for name in ("ts", "go")]
    assert "on 3 languages of 2 benchmarks" in headline("m", [], scores + more)


def test_without_drafts_nothing_is_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With decoders=[] "The texts were too short for drafts" stood under every table."""
    speed = fixture.speed(temperatures=(0.0,))
    speed["rows"] = [row for row in speed["rows"] if row["decoder"] == "plain"]
    print_report(build(fixture.write_parts(tmp_path, speed=speed)), ["speed"])
    assert "too short" not in capsys.readouterr().out


def test_the_headline_is_the_default_of_decoding_and_names_what_is_faster(tmp_path: Path) -> None:
    """Of all rows the luckiest was the headline; n-grams alone may be faster, and that is said."""
    faster = fixture.faster(single(peers=False), 3, "ngrams")
    _, best = built(tmp_path, faster)
    assert (best["label"], best["faster"]) == ("sdsat", "n-grams only")
    assert "n-grams only is 2" in sentence(best)
    next(row for row in faster["rows"] if row["decoder"] == "ngrams")["speedup_interval"] = [0.5, 9]
    _, best = built(tmp_path, faster)
    assert best["faster"] is None and "n-grams" not in sentence(best)


def test_accepted_drafts_are_shown_by_source_and_place(tmp_path: Path, capsys) -> None:
    print_report(write(fixture.write_parts(tmp_path, speed=single())))
    cells = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("sdsat  ")]
    assert cells[1] == ["sdsat", "50", "20", "30", "93", "88", "84", "80", "72", "65"]  # places 1 2 3 4 6 8
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'aria-label="adaptive 50 %, text 20 %, n-grams 30 %"' in page
    assert '<i class="ngrams" style="width: 30.00%"' in page
    with (tmp_path / "speed.csv").open() as file:
        rows = {row["decoder"]: row for row in csv.DictReader(file)}
    assert rows["auto"]["sources.text.share"] == "0.2" and rows["plain"]["sources.text.share"] == ""


def test_a_report_from_before_there_were_sources_is_read(tmp_path: Path) -> None:
    """Its `auto` drafted by adaptive tokens alone, and must not stand beside today's as the same decoder."""
    speed = single(peers=False)
    speed["rows"] = [row for row in speed["rows"] if row["decoder"] not in ("adaptive", "ngrams")]
    for row in speed["rows"]:
        del row["sources"], row["acceptance_where_reached"]
    report = write(fixture.write_parts(tmp_path, speed=speed | {"schema": 3}))
    names = [row["decoder"] for row in report["speed"]["rows"]]
    assert "adaptive" in names and "auto" not in names and report["speed"]["schema"] == 4


def training_folder(folder: Path) -> Path:
    """What train leaves that a report reads, beside the data it was made of."""
    steps = 250
    (folder / "data").mkdir(parents=True)
    (folder / "data/manifest.json").write_text(json.dumps(with_checksum({"seq_len": 512, "seconds": 8.6})))
    manifest = {
        "kind": "checkpoint",
        "settings": {"objective": {"name": "branch", "L": 5}, "steps": steps, "global_batch": 4},
        "parameters": 2_672_384,
        "ranks": 2,
        "step": steps,
        "validation": [{"step": 0, "standard_loss": 1.4, "masked_loss": 5.7, "accepted": 0.1}],
        "data": fixture.training()["data"],
        "places": {"data.path": str(folder / "data")},
        "commit": "0123",
        "created": "2026-11-23T05:04:38+00:00",
    }
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    # Step 2 was done again after an interruption.
    numbers = [1, 2, *range(2, steps + 1)]
    row = {"tokens_per_second": 1024}
    rows = [row | {"step": step, "standard_loss": step, "masked_loss": 2 * step} for step in numbers]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_report_keeps_how_its_model_was_made(tmp_path: Path, monkeypatch, capsys) -> None:
    folder, tuned = tmp_path / "report", training_folder(tmp_path / "tuned")
    fixture.write_parts(folder, quality=fixture.quality())
    command(monkeypatch, f"out={folder}", f"training={tuned}")
    remaining = json.loads((folder / "training.json").read_text())
    assert remaining["tokens"] == 250 * 4 * 512 and len(remaining["log"]) <= 100
    assert remaining["log"][0] == {"step": 3, "standard_loss": 2, "masked_loss": 4}  # means of three steps
    assert remaining["stages"] == {"data_prep": 8.6, "training": 250 * 4 * 512 / 1024}
    page = (folder / "index.html").read_text()
    assert "8 min 20 s" in page and 'id="plot-training"' in page
    write(folder)  # later, without the training folder
    assert 'id="plot-training"' in (folder / "index.html").read_text()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "got no manifest.json in it"),
        (lambda folder: (folder / "log.jsonl").write_text("{"), "log.jsonl must be the log of a training"),
    ],
)
def test_what_is_no_training_folder_is_refused(tmp_path: Path, monkeypatch, capsys, spoil, sentence) -> None:
    tuned = training_folder(tmp_path / "tuned")
    spoil(tuned)
    fixture.write_parts(tmp_path, quality=fixture.quality())
    assert sentence in refused(monkeypatch, capsys, f"out={tmp_path}", f"training={tuned}")
    assert not (tmp_path / "index.html").exists()


def renamed(value: Any, name: str) -> Any:
    """Every benchmark, language and prompt set, with `name` before its own."""
    if isinstance(value, dict):
        keys = ("language", "benchmark", "prompt_set")
        return {key: name + item if key in keys else renamed(item, name) for key, item in value.items()}
    return [renamed(item, name) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["$x_$", "[/b]x", "half \ud800", "\x1b]0;title\x07", "<script>", "a|b"])
def test_any_name_can_be_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished evaluation of a language "$x_$", "[/b]x" or with half a surrogate pair ended in a traceback of
    matplotlib, rich or the CSV's encoding, and so did every later run.
    """
    fixture.write_parts(tmp_path, speed=renamed(single(), name), quality=renamed(fixture.quality(), name))
    print_report(write(tmp_path))
    output = capsys.readouterr().out
    assert "\x1b" not in output and output.encode() and (tmp_path / "quality.csv").is_file()
    assert "<script>" not in (tmp_path / "index.html").read_text()
