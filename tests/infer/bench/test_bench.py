"""Test infer.bench on a model with random weights: parts, resuming, the report."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from conf.settings.compose import settings
from conf.text.rows import read_rows
from infer.api import load
from infer.bench import run as bench_run
from infer.bench import sandbox
from infer.bench.config import BenchConfig
from infer.bench.names import k_of
from infer.bench.peers import peer_decoders
from infer.bench.quality import QualityPart
from infer.bench.report import RESULT, header
from infer.bench.run import bench, benchmark_of, read_prompt_sets
from infer.bench.runs import blocks, decoder, run_of
from infer.bench.speed import SpeedPart, figures
from infer.bench.tables import speed_table
from infer.bench.timing import StepClock, StepTimes
from infer.chat import has_template
from infer.config import DecodeConfig, Infill, decontaminated
from infer.loop import Step
from infer.models.checkpoint import ModelDirectory
from tests.conftest import write_rows

DOCUMENTS = [
    "def first(x):\n    return x + 1\n" * 4,
    "for item in range(3):\n    print(item)\n" * 4,
]
TINY = [
    "dtype=float32",
    "count=2",
    "speed.rounds=2",
    "speed.k=[2]",
    "speed.max_new_tokens=12",
    "quality.problems=2",
    "quality.max_new_tokens=12",
    "tracker.mode=disabled",
]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": f"file{at}", "content": text} for at, text in enumerate(DOCUMENTS)]
    return write_rows(tmp_path_factory.mktemp("prompts") / "held_out.jsonl", rows)


def configured(model: Path, prompts: Path, out: Path, *overrides: str) -> BenchConfig:
    files = [f"prompts=[{prompts}]", f"quality.lines={prompts}"]
    arguments = [f"model={model}", f"out={out}", *files, *TINY, *overrides]
    return settings("bench", BenchConfig, arguments)


def read_report(out: Path) -> dict[str, Any]:
    return read_json(out / "report.json")


@pytest.fixture(scope="session")
def out(
    model_dir: Path,
    base_dir: Path,
    prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "report"
    words = ["/bin/python3", "-u", "-m", "infer.bench", "model=M & N", "dtype=float32"]
    with mock.patch("sys.orig_argv", words):
        bench(
            configured(model_dir, prompts, folder, f"base={base_dir}", "draft=self:1")
        )
    return folder


def test_every_decoder_has_a_row_of_consistent_figures(out: Path) -> None:
    rows = read_report(out)["speed"]["rows"]
    greedy = {row["decoder"]: row for row in rows if row["temperature"] == 0}
    ours = {"hybrid", "adaptive", "sdsat k=2", "ngrams", "prompt_lookup"}
    peers = {"hf generate", "hf prompt_lookup", "hf assisted"}
    assert greedy.keys() == {"plain", "plain, again", "base, plain"} | ours | peers
    assert len(rows) == 2 * len(greedy) and greedy["plain"]["speedup"] == 1
    for row in rows:
        assert row["prompts"] == 2
        assert row["speedup_interval"] is None and row["speedup"] > 0
        assert row["output_tokens_per_second"] > 0 and row["cpu_seconds"] > 0
        if row["decoder"] in ours:
            assert row["same"] == row["compared"] == 4
            if not row["verifications"]:  # a planner found that no draft pays
                assert row["decoder"] in ours - {"sdsat k=2"}
                assert row["accepted"] == 0 and row["mean_acceptance_length"] is None
                assert not row["sources"] and not row["survival"]
                continue
            accepted = row["accepted"] / row["verifications"]
            assert sum(row["sources"].values()) == pytest.approx(float(accepted > 0))
            assert row["mean_acceptance_length"] == pytest.approx(1 + accepted)
            assert sum(row["survival"]) == pytest.approx(accepted)


def test_records_have_the_times_of_all_steps(out: Path) -> None:
    """All speedups, also of peers, can be computed again from a result folder."""
    for file in (out / "speed" / "records").iterdir():
        for run in read_json(file)["runs"]:
            steps = StepTimes.parse(run["steps"])
            assert len(steps.microseconds) == len(steps.rows) == run["forwards"]
            seconds = 1e-6 * sum(steps.microseconds)
            assert seconds == pytest.approx(run["seconds"], abs=1e-6 * run["forwards"])
            plain = run["decoder"] in ("plain", "plain, again", "base, plain")
            assert not plain or set(steps.rows) == {1} and set(steps.levels) == {0}
            if run["decoder"] == "hf generate":
                assert set(steps.rows[1:]) == {1} and steps.rows[0] > 1


def test_quality_compares_model_and_base(out: Path) -> None:
    rows = read_report(out)["quality"]["rows"]
    answering = (("model", "plain"), ("model", "hybrid"), ("base", "plain"))
    assert {(row["benchmark"], row["who"], row["decoder"]) for row in rows} == {
        (name, *pair) for name in ("humaneval", "lines") for pair in answering
    }
    content = read_report(out)["quality"]["content"]
    assert content.keys() == {"humaneval", "lines"}
    assert len(read_report(out)["speed"]["content"]) == 1
    for row in rows:
        assert row["problems"] == 2
        assert row["same"] == row["compared"] == 2 * (row["decoder"] == "hybrid")
        judged = row["benchmark"] == "lines" or not sandbox.unavailable()
        assert (row["value"] is not None) == judged
    file = out / "quality" / "solutions" / "humaneval-model-plain.jsonl"
    solutions = read_rows(file)
    names = [solution["task_id"] for solution in solutions]
    assert names == ["HumanEval/0", "HumanEval/1"]
    assert all("def " in solution["solution"] for solution in solutions)


def test_a_finished_bench_only_writes_its_report_again(
    out: Path,
    model_dir: Path,
    base_dir: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configured(model_dir, prompts, out, f"base={base_dir}", "draft=self:1")
    with mock.patch.object(SpeedPart, "load", side_effect=AssertionError):
        bench(config)
    printed = capsys.readouterr().out
    assert printed.count("is finished: nothing to do") == 2 and "hybrid" in printed
    page = (out / "index.html").read_text()
    assert "data:image" not in page and 'src="' not in page and "<script" not in page
    command = (
        "<code>python -m infer.bench &#39;model=M &amp; N&#39; dtype=float32</code>"
    )
    assert page.count(command) == 2  # of the speed, of the quality
    titles = re.findall("<figcaption>(.*?)</figcaption><svg", page)
    begins = {title.partition(":")[0] for title in titles}
    assert {"Speedup over plain decoding", "Cost of a forward"} <= begins
    rows = read_report(out)["speed"]["rows"]
    drafted = any(row["survival"] for row in rows if not row["temperature"])
    assert ("Acceptance rate per position (survival)" in begins) == drafted
    drawn = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert len(drawn) == len(titles) == len(set(titles))
    assert all("currentColor" in plot and "#010203" not in plot for plot in drawn)
    names = re.findall(' id="(.*?)"', page)
    assert len(names) == len(set(names)), "two elements of the page have one name"


def test_a_finished_part_without_its_result_is_a_sentence(
    out: Path, model_dir: Path, base_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Regression: the command printed "finished: nothing to do", then a traceback of the report."""
    copy = shutil.copytree(out, tmp_path / "bench")
    (copy / "speed" / RESULT).unlink()
    config = configured(model_dir, prompts, copy, f"base={base_dir}", "draft=self:1")
    with pytest.raises(UserError, match=f"speed has no {RESULT}. Delete {copy}/speed"):
        bench(config)


def test_the_parts_of_a_report_are_of_one_model(
    out: Path, base_dir: Path, prompts: Path
) -> None:
    """Bug: a score of another model was added to a report, and shown as the score of the measured model."""
    config = configured(base_dir, prompts, out, "part=load")
    with pytest.raises(UserError, match="the finished part speed is of another model"):
        bench(config)


def test_a_wrong_benchmark_file_ends_the_command_before_it_measures(
    model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Bug: part=quality read its files only after part=speed was measured, which can take hours."""
    wrong = f"quality.mbpp={tmp_path / 'absent.jsonl'}"
    config = configured(model_dir, prompts, tmp_path / "out", wrong)
    with pytest.raises(UserError, match="quality.mbpp"):
        bench(config)
    assert not (tmp_path / "out").exists()


def test_a_manifest_of_another_program_does_not_end_a_report(tmp_path: Path) -> None:
    """Bug: a manifest.json that is a list, or is damaged, ended in a traceback after all measurements."""
    (tmp_path / "manifest.json").write_text("[1]")
    assert decontaminated(tmp_path) is None
    (tmp_path / "manifest.json").write_text('{"kind": "mod')
    with pytest.raises(UserError, match="must be JSON, got .* Restore it"):
        decontaminated(tmp_path)


def test_a_corrected_answer_of_a_benchmark_is_another_benchmark(
    model_dir: Path, tmp_path: Path
) -> None:
    """Bug: after a correction of expected texts, or of MultiPL-E's tests, the old scores were reused."""
    fields = {"prompt": "f", "language": "lua", "stop_tokens": ["\nend"]}
    hole = {"task_id": "a", "prompt": "a = ", "suffix": "\nb"}
    contents = []
    for answer in ("1", "2"):
        holes = write_rows(tmp_path / "holes", [hole | {"canonical_solution": answer}])
        lua = write_rows(tmp_path / "lua", [fields | {"name": "m", "tests": answer}])
        files = [f"quality.infilling={holes}", f"quality.multipl_e=[{lua}]"]
        config = configured(model_dir, holes, tmp_path, *files, "quality.lines=null")
        config.quality.humaneval = False
        content = QualityPart(config, ModelDirectory(model_dir)).content
        assert len(content) == 2
        contents += content
    assert len({str(item) for item in contents}) == 4


def test_a_draft_model_answers_benchmarks(
    model_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: after all plain answers it ended with "needs a draft model, got none" in spite of draft=.

    Without draft= these decoders were left out without a word.
    """
    decoders = [
        "part=quality",
        "quality.humaneval=false",
        "quality.decoders=[plain,gsd]",
    ]
    for draft, expected in (([], ["plain"]), (["draft=self:1"], ["plain", "gsd"])):
        folder = tmp_path / str(len(draft))
        bench(configured(model_dir, prompts, folder, *decoders, *draft))
        rows = read_report(folder)["quality"]["rows"]
        assert [row["decoder"] for row in rows] == expected
        warned = (
            "quality.decoders=gsd left out: give draft=DIR" in capsys.readouterr().err
        )
        assert warned == (not draft)
    assert rows[1]["same"] == rows[1]["compared"] == 2


def test_an_interrupted_run_continues(
    model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    overrides = ["part=speed", "speed.decoders=[ngrams]"]
    config = configured(model_dir, prompts, tmp_path / "out", *overrides)
    measure = SpeedPart.measure
    names = []

    def interrupted_once(part: SpeedPart, task: tuple[str, int, int]) -> Any:
        names.append(task)
        if len(names) == 3:
            raise KeyboardInterrupt
        return measure(part, task)

    with mock.patch.object(SpeedPart, "measure", interrupted_once):
        with pytest.raises(KeyboardInterrupt):
            bench(config)
        assert not (tmp_path / "out" / "speed").exists()
        bench(config)
    assert len(names) == 5 and len(set(names)) == 4
    report = read_report(tmp_path / "out")
    assert report["quality"] is None
    rows = {row["decoder"]: row for row in report["speed"]["rows"]}
    assert rows["ngrams"]["compared"] == 2 * 2


def test_float32_texts_that_differ_fail_the_run(out: Path) -> None:
    report = read_report(out)
    bench_run.check_same(report)
    rows = report["speed"]["rows"]
    next(row for row in rows if row["decoder"] == "hybrid")["same"] -= 1
    with pytest.raises(
        UserError, match="must equal plain decoding's; different texts: 1 .*hybrid"
    ):
        bench_run.check_same(report)


def test_gsd_tables(model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    overrides = ["part=gsd", "draft=self:1", "count=1", "gsd.max_new_tokens=8"]
    bench(configured(model_dir, prompts, tmp_path, *overrides))
    rows = {row["setting"]: row for row in read_report(tmp_path)["gsd"]["rows"]}
    assert {"greedy ssd", "greedy tsd", "greedy gsd", "top-p gsd"} <= rows.keys()
    assert all(0 <= row["graph_success"] <= 1 for row in rows.values())
    page = (tmp_path / "index.html").read_text()
    for figure, panels in (("3", 1), ("5", 4), ("7", 1), ("8", 1)):
        captions = re.findall(rf"<figcaption>[^<]*\(Figure {figure}\), ", page)
        assert len(captions) == panels


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("part=gsd", "part=gsd needs a draft model"),
        ("speed.decoders=[vllm]", "speed.decoders must be"),
        # The reason began with "[Errno 2]".
        ("prompts=[absent.jsonl]", "=absent.jsonl must be humaneval, .* got No such f"),
        ("prompts=[{0},{0}]", "prompts must be prompt sets with different names, got"),
        ("prompts=[]", "prompts must not be empty"),
        # The cure was NAME="VALUE", which is no list.
        ("prompts=[a=b.jsonl]", r"Quote each member as \"NAME=\['MEMBER'\]\""),
        (
            "speed.k=[20]",
            "speed.k must be at most 13, the levels .* got 20. Lower speed",
        ),
        ("gsd.k=17", "gsd.k must be 1 to 16, got 17"),
        ("speed.temperatures=[1e-31]", "temperature must be 0 .* got 1e-31"),
        ("count=3", "count must be at most 2, .* got 3. Lower count, or raise prompt"),
        ("quality.decoders=[]", "quality.decoders must not be empty. Give quality.dec"),
        ("quality.mbpp=absent", "quality.mbpp=absent must be a file of this"),
    ],
)
def test_mistakes_are_one_sentence(
    model_dir: Path, prompts: Path, tmp_path: Path, override: str, message: str
) -> None:
    part = "part=quality" if "quality" in override else "part=speed"
    with pytest.raises(UserError, match=message):
        given = override.format(prompts)
        bench(configured(model_dir, prompts, tmp_path / "out", part, given))
    assert not (tmp_path / "out").exists()


def test_messages_need_a_chat_template(model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    messages = [{"role": "user", "content": "hello"}]
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    overrides = ["part=speed", "count=1", "speed.decoders=[ngrams]", "speed.peers=[]"]
    with pytest.raises(UserError, match="must have a chat template for messages"):
        bench(configured(model, chat, tmp_path / "out", *overrides))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    write_json(model / "tokenizer_config.json", config)
    has_template.cache_clear()
    bench(configured(model, chat, tmp_path / "out", *overrides))
    assert read_report(tmp_path / "out")["speed"]["chat"]


def test_prompts_that_do_not_fit_the_context_are_counted(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: they were equal texts without a warning, even if no prompt was answered."""
    long = "".join(f"value_{n} = {n}\n" for n in range(300))
    texts = {"long": long, "short": "x = 1\ny = 2\nz = 3\n"}
    rows = [{"id": id, "content": text} for id, text in texts.items()]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    overrides = ["part=quality", "quality.humaneval=false"]
    bench(configured(model_dir, file, tmp_path / "out", *overrides))
    report = read_report(tmp_path / "out")["quality"]
    counts = [(row["unfit"], row["same"], row["compared"]) for row in report["rows"]]
    assert counts == [(1, 0, 0), (1, 1, 1)]
    assert all(row["value"] is not None for row in report["rows"])
    (warning,) = report["warnings"]
    begin = "lines: 1 of 2 prompts without room in the context of the model for"
    assert warning.startswith(begin) and f"warning: {begin}" in capsys.readouterr().out
    overrides.append("quality.max_new_tokens=510")
    with pytest.raises(UserError, match=r"must leave room .* 512 tokens, got 510, and"):
        bench(configured(model_dir, file, tmp_path / "none", *overrides))
    assert not (tmp_path / "none").exists()


@given(st.integers(0, 9), st.integers(0, 40))
def test_every_decoder_stands_beside_plain_decoding(count: int, turn: int) -> None:
    names = list(range(count))
    turns = blocks(names, -1, turn)
    assert sorted(name for block in turns for name in block if name >= 0) == names
    for block in turns:
        at = block.index(-1)
        assert len(block) <= 3 and all(abs(at - i) <= 1 for i in range(len(block)))


def test_acceptance_by_position_of_chosen_steps() -> None:
    """Of three verifications of three drafts, 3, 1 and 0 are accepted."""
    steps = [Step(0, [1] * (n + 1), 3, n, False, depth=3) for n in (3, 1, 0)]
    clock = StepClock(iter((0.0, 1.0, 1.5, 2.0)).__next__)
    for _ in steps:
        clock.stamp()
    run = run_of(steps, clock).record()
    pair = {"seconds": 4.0, "tokens": 7, "text": run["text"]}
    row = figures([[run | {"plain_text": run["text"]}]], [[pair]], [1.0])
    assert row["speedup"] == 2 and row["speedup_interval"] is None
    assert row["first_token_ms"] == 1000
    assert row["survival"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert row["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert row["draft_acceptance_rate"] == pytest.approx(4 / 9)


def test_acceptance_of_sdsat_divides_by_k_and_verifications_not_by_nodes() -> None:
    """Regression: a tree of 28 nodes at k=5 gave a rate of 5/56 in place of 5/10."""
    steps = [Step(0, [1] * (n + 1), 28, n, False, depth=5) for n in (4, 1)]
    clock = StepClock(iter((0.0, 1.0, 2.0)).__next__)
    for _ in steps:
        clock.stamp()
    run = run_of(steps, clock).record()
    run |= {"plain_text": run["text"]}
    row = figures([[run]], [[run]], [1.0], k=k_of("sdsat k=5"))
    assert row["acceptance_rate"] == pytest.approx(5 / 10)
    assert row["draft_acceptance_rate"] == pytest.approx(5 / 56)
    assert k_of("hybrid") is None


def test_the_table_has_the_share_of_all_drafts(out: Path) -> None:
    """Bug: for sdsat it had SDSAT's rate, 26 % where 4 % of a tree's drafts were accepted."""
    rows = [
        row | {"acceptance_rate": 0.26, "draft_acceptance_rate": 0.04}
        for row in read_report(out)["speed"]["rows"]
    ]
    table = speed_table("", rows)
    place = table.heads.index("acc.\n%")
    assert {cells[place] for cells in table.rows} == {"4"}


def test_the_header_has_what_was_measured(out: Path) -> None:
    """Bug: it named the k and the number of prompts that were asked for."""
    part = read_report(out)["speed"]
    assert "2 prompts per set x 2 rounds" in header(part) and "k=2" not in header(part)
    part["settings"] |= {"count": 20, "infilling_tokens": 4}
    line = header(part)
    assert "2 prompts per set" in line and "new tokens (4 of an infilling)" in line


def test_decoders_that_the_model_cannot_have_are_named(
    base_dir: Path,
    model_dir: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: they were left out without a word, and so was a k above the model's adaptive tokens."""
    given = ["part=speed", "speed.decoders=[hybrid]", "speed.rounds=1", "count=1"]
    given += ["speed.peers=[]", "speed.max_new_tokens=2"]
    bench(configured(base_dir, prompts, tmp_path / "base", *given))
    error = capsys.readouterr().err
    assert "speed.decoders=hybrid left out: model=" in error
    with mock.patch("infer.bench.speed.max_k", lambda model: 2):
        given += ["speed.decoders=[sdsat]", "speed.k=[1,3]"]
        bench(configured(model_dir, prompts, tmp_path / "model", *given))
    assert "speed.k=3 left out: the model has 2 different" in capsys.readouterr().err
    rows = read_report(tmp_path / "model")["speed"]["rows"]
    assert {row["decoder"] for row in rows} == {"plain", "plain, again", "sdsat k=1"}


def test_the_context_of_the_base_is_checked_before_models_are_loaded(
    model_dir: Path, base_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Bug: the message came after loading, and named settings that infer.bench does not have."""
    base = tmp_path / "base"
    shutil.copytree(base_dir, base)
    config = read_json(base / "config.json") | {"max_position_embeddings": 16}
    write_json(base / "config.json", config)
    overrides = ["part=speed", f"base={base}"]
    with pytest.raises(
        UserError, match="for base=.* and speed.max_new_tokens must fit"
    ):
        bench(configured(model_dir, prompts, tmp_path / "out", *overrides))


def test_documents_cut_to_other_prompts_are_other_content(
    model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Bug: reports of other prompt lengths were compared without a warning."""
    given = ["part=speed", "speed.decoders=[ngrams]", "speed.rounds=1", "count=1"]
    given += ["speed.peers=[]", "speed.max_new_tokens=2"]
    contents = []
    for tokens in (4, 8):
        out = tmp_path / str(tokens)
        length = f"prompt_tokens={tokens}"
        bench(configured(model_dir, prompts, out, *given, length))
        contents.append(read_report(out)["speed"]["content"])
    assert contents[0] != contents[1]


@pytest.mark.parametrize(
    ("name", "benchmark"),
    [
        ("humaneval", "humaneval"),
        ("HumanEval", "humaneval"),
        ("HumanEval-SingleLineInfilling", "infilling"),
        ("HumanEval-RandomSpanInfillingLight", "infilling"),
        ("humaneval-java", "multipl_e"),
        ("multipl_e-sh", "multipl_e"),
        ("sanitized-mbpp", "mbpp"),
        ("held_out", ""),
    ],
)
def test_files_of_benchmarks_are_known_by_name(name: str, benchmark: str) -> None:
    """Bug: training data with such a benchmark caused no warning."""
    assert benchmark_of(name) == benchmark


def test_the_papers_infilling_half_has_its_own_share_length_and_order(
    model_dir: Path, tmp_path: Path
) -> None:
    """Table 4: 3 % of the infilling prompts, 50 tokens each, suffix first."""
    rows = [
        {"task_id": str(at), "prompt": f"a{at} = ", "suffix": "\nb = 2\n"}
        for at in range(67)
    ]
    file = str(write_rows(tmp_path / "holes.jsonl", rows))
    arguments = [f"model={model_dir}", "out=o", "experiment=paper", f"prompts=[{file}]"]
    config = settings("bench", BenchConfig, arguments)
    directory = ModelDirectory(model_dir)
    (prompts,) = read_prompt_sets(config, directory).values()
    text = directory.text
    expected = {
        row["task_id"]: tuple(text.infill(Infill(row["prompt"], row["suffix"], "spm")))
        for row in rows
    }
    assert len(prompts) == 2
    assert all(p.ids == expected[p.id] and p.max_new_tokens == 50 for p in prompts)
    model = load(directory, dtype="float32")
    short = replace(prompts[0], max_new_tokens=3)
    plain = DecodeConfig("plain", max_new_tokens=30)
    ours = decoder(model, plain, seed=0)(short)
    assert len(ours.tokens) <= 3
    peers = peer_decoders(model, plain, ["generate"], 0)
    assert peers["generate"](short).tokens == ours.tokens


def test_answers_that_cannot_be_judged_are_left_out_where_asked(
    model_dir: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: without bwrap the demo decoded answers for minutes that could not be judged."""
    reason = "judging programs needs bwrap."
    monkeypatch.setattr(sandbox, "unavailable", lambda: reason)
    asked = ["part=quality", "quality.unjudged=false", "quality.lines=null"]
    config = configured(model_dir, prompts, tmp_path / "out", *asked)
    with pytest.raises(UserError, match=f"part quality: humaneval .* {reason}"):
        bench(config)
    assert not (tmp_path / "out").exists()
    part = QualityPart(
        settings_with(config, lines=str(prompts)), ModelDirectory(model_dir)
    )
    assert {batch.benchmark for batch in part.tasks.values()} == {"lines"}


def settings_with(config: BenchConfig, **quality: Any) -> BenchConfig:
    return replace(config, quality=replace(config.quality, **quality))


def test_a_report_of_nothing_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    """Bug: the message was to run infer.bench; beside a finished part the code was 0.

    Bug: the line "part quality is left out:" ended without a reason.
    """
    overrides = ["part=quality", "quality.humaneval=false", "quality.lines=null"]
    config = configured(model_dir, tmp_path, tmp_path / "out", *overrides)
    with pytest.raises(UserError, match=r"nothing to measure\. part quality: no bench"):
        bench(config)
