"""python -m infer.regenerate: the text it writes, and on what it depends."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from conf.errors import RankLocalError, UserError
from conf.runs.stage import partial_of, read_manifest
from conf.settings.compose import settings
from data_prep.shards import Shards
from infer import own_text
from infer import regenerate as stage
from infer.api import Model, generate, load
from infer.bench.harness import Records, WorkerGroup
from infer.chat import chat_ids, user_header
from infer.engine.sampling import seed_from
from infer.own_text import (
    PLAIN,
    TrainingDocuments,
    before_loop,
    whole_lines,
    whole_sentences,
)
from infer.prompts import messages_of
from infer.regenerate import KIND, RegenerateConfig
from tests import warm
from tests.conftest import write_rows
from tests.infer.library import tokens_of

Run = Callable[..., RegenerateConfig]


def composed(*overrides: str) -> RegenerateConfig:
    return settings("regenerate", RegenerateConfig, list(overrides))


@pytest.fixture
def run(model_dir: Path, data_folder: Path, tmp_path: Path) -> Run:
    """Settings of a small run into the folder `name`."""

    def small(name: str, *overrides: str) -> RegenerateConfig:
        folders = [f"model={model_dir}", f"data.path={data_folder}"]
        sizes = ["documents=11", "prefix_min=3", "prefix_max=9", "batch=4"]
        rest = [f"out={tmp_path / name}", "max_new_tokens=12", "dtype=float32"]
        return composed(*folders, *sizes, *rest, *overrides)

    return small


def shards(config: RegenerateConfig) -> dict[str, bytes]:
    paths = sorted(Path(config.out).glob("*.jsonl"))
    return {path.name: path.read_bytes() for path in paths}


def rows(config: RegenerateConfig) -> list[dict[str, Any]]:
    lines = b"".join(shards(config).values()).splitlines()
    return [json.loads(line) for line in lines]


def test_a_document_is_its_prefix_and_the_models_continuation(
    run: Run, model: Model
) -> None:
    config = run("out")
    stage.main(config)
    source = TrainingDocuments(config)
    written = rows(config)
    for document, row in zip(source.drawn(), written, strict=True):
        prompt = whole_lines(model.text, source.prompt(document), config.prefix_min)
        new = "".join(
            step.text for step in generate(model, prompt, config.decode(document.id))
        )
        assert sorted(row) == ["content", "id", "language", "prefix"]
        assert (row["id"], row["language"]) == (document.id, document.language)
        assert row["content"][: row["prefix"]] == model.text.decode(prompt)
        assert row["content"][row["prefix"] :] == new.rstrip("\ufffd")
    assert read_manifest(config.out, KIND, "out")["documents"] == len(written) == 11
    assert sorted(os.listdir(config.out)) == ["manifest.json", "own-00000.jsonl"]


@examples(max_examples=20)
@given(
    st.integers(0, 2**40), st.integers(1, 20), st.integers(0, 20), st.integers(1, 30)
)
def test_prefixes_are_of_plain_training_documents_and_drawn_by_seed_and_id(
    data_folder: Path, seed: int, least: int, extra: int, count: int
) -> None:
    most = least + extra
    fixed = ["model=m", "out=o", f"data.path={data_folder}", f"seed={seed}"]
    fixed += [f"prefix_min={least}", f"prefix_max={most}"]
    source = TrainingDocuments(composed(*fixed, f"documents={count}"))
    sequences = Shards(data_folder, "train")
    drawn = source.drawn()
    assert len({document.id for document in drawn}) == len(drawn) == count
    for document in drawn:
        sequence = sequences[document.sequence]
        prompt = source.prompt(document)
        span = sequence.spans[sequence.ids.index(document.id)]
        end = document.start + len(prompt)
        assert (span["start"], span["mode"]) == (document.start, PLAIN)
        assert prompt == sequence.tokens[document.start : end].tolist()
        assert 1 + least <= len(prompt) <= 1 + most and end < document.stop


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_text_depends_on_seed_and_document_alone(
    run: Run, base_dir: Path, temperature: str
) -> None:
    sampled = f"temperature={temperature}"
    variants = [
        [],
        ["batch=3"],
        [f"model={base_dir}", "batch=1"],
    ]
    configs = [run(str(n), sampled, *variant) for n, variant in enumerate(variants)]
    other = run("other", sampled, "seed=1")
    fewer = run("fewer", sampled, "documents=5")
    for config in (*configs, other, fewer):
        stage.main(config)
    assert len({str(shards(config)) for config in configs}) == 1
    assert rows(fewer) == rows(configs[0])[:5]
    assert shards(other) != shards(configs[0])


def _rank(config: RegenerateConfig) -> None:
    stage.SHARD_DOCUMENTS = 3
    stage.main(config)
    dist.barrier()


def _killed(config: RegenerateConfig) -> None:
    """A run that is killed when it has saved two batches."""
    save = Records.save
    saved = []

    def kill(self: Records, name: str, value: Any) -> None:
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, name, value)
        saved.append(name)

    stage.SHARD_DOCUMENTS = 3
    Records.save = kill  # type: ignore[method-assign]
    stage.main(config)


def test_two_ranks_and_a_killed_run_write_the_bytes_of_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "SHARD_DOCUMENTS", 3)
    sizes = ["documents=23", "batch=2", "temperature=1"]
    alone, both, killed = (run(name, *sizes) for name in "abc")
    stage.main(alone)
    assert list(shards(alone)) == [f"own-{index:05}.jsonl" for index in range(8)]
    assert warm.call_ranks(_rank, both, ranks=2) == 0
    assert shards(both) == shards(alone)
    assert warm.call_ranks(_killed, killed) == -signal.SIGKILL
    assert not Path(killed.out).exists()
    stage.main(killed)
    assert shards(killed) == shards(alone)
    stage.main(killed)
    assert "is finished: nothing to do" in capsys.readouterr().out


def test_a_run_does_not_mix_dtypes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a run of dtype=auto that continued on a machine with another type had texts of both."""
    config = run("a", "dtype=auto")
    saved: list[str] = []
    save = Records.save

    def stop_after_one(self: Records, name: str, value: Any) -> None:
        save(self, name, value)
        saved.append(name)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Records, "save", stop_after_one)
    chosen = iter(["bfloat16", "float32"])

    def choose(requested: str, device: str | None = None) -> str:
        return next(chosen) if requested == "auto" else requested

    monkeypatch.setattr("infer.models.checkpoint.choose_dtype", choose)
    with pytest.raises(KeyboardInterrupt):
        stage.main(config)
    stage.main(config)
    assert len(saved) == 1 + 3  # all three batches of the 11 documents again


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prefix_max=2"], r"prefix_max must be at least prefix_min=3, got 2\. Raise"),
        (["prefix_min=900", "prefix_max=900"], "got none. Lower prefix_min"),
        (
            ["sampled=0.5"],
            r"sampled=0\.5 needs a temperature above 0, got temperature=0",
        ),
    ],
)
def test_mistakes(run: Run, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        stage.main(run("out", *overrides))


def test_a_dtype_for_a_server_is_refused() -> None:
    """Bug: dtype was ignored with endpoint."""
    server = ("prompts=[p.jsonl]", "endpoint=http://localhost:1", "out=o")
    with pytest.raises(UserError, match="dtype must be auto with endpoint, got int8"):
        composed("model=m", *server, "dtype=int8")


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "http://localhost:99999/v1", "http://h:abc", "http://[::1"],
)
def test_addresses(address: str) -> None:
    """Bug: wrong ports and brackets ended in a traceback at the first request."""
    with pytest.raises(UserError, match="endpoint must be an address such as"):
        composed("model=m", "prompts=[p.jsonl]", f"endpoint='{address}'", "out=o")


def test_a_question_needs_a_chat_template_before_the_weights_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: it was refused at the first answer, after the model was loaded."""
    monkeypatch.setattr("infer.api.load", None)
    with pytest.raises(UserError, match="must have a chat template for messages, got"):
        stage.main(run("out", "question=Why?"))


def test_a_text_beyond_the_context_is_refused_before_the_weights_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the loaded model refused it, by a setting that this command does not have.

    The message was: prompts[0] and decode.max_new_tokens must fit the model's context.
    """
    monkeypatch.setattr("infer.api.load", None)
    message = (
        r"the prefix of .+ and max_new_tokens must fit the model's context of 512 tokens, got "
        r"\d+ \+ 505. Lower max_new_tokens, or lower prefix_max"
    )
    config = run("out", "max_new_tokens=505")
    with pytest.raises(UserError, match=message):
        stage.main(config)
    assert not Path(config.out).exists()


TURNS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


@pytest.fixture
def chat_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The model with a chat template."""
    folder = tmp_path / "chat"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(TURNS)
    return folder


def test_prompts_are_answered_in_any_batches(
    chat_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"prompt": "def f(x):"}, {"messages": [{"role": "user", "content": "x"}]}]
    asked[1]["messages"].append({"role": "assistant", "content": "not this"})
    asked.append({"prompt": "beyond the context " * 99})  # it ended the run
    file = write_rows(tmp_path / "asked.jsonl", asked)
    configs = [
        composed(
            f"model={chat_dir}",
            f"prompts=[{file}]",
            "own_prompts=6",
            "temperature=1",
            "sampled=0.5",
            "max_new_tokens=24",
            "dtype=float32",
            f"batch={batch}",
            f"out={tmp_path / str(batch)}",
        )
        for batch in (3, 8)
    ]
    for config in configs:
        stage.main(config)
    assert shards(configs[0]) == shards(configs[1])
    # Bug: a prompt beyond the context was left out without a word.
    assert f"{file}:2 is left out: " in capsys.readouterr().err
    model = load(chat_dir, "float32")
    answered = {row["id"]: row for row in rows(configs[0])}
    for index in (0, 1):
        id = f"{file}:{index}"
        *messages, answer = answered[id]["messages"]
        assert messages == list(messages_of(asked[index]))
        prompt = chat_ids(chat_dir, messages)
        seeds = [seed_from(0, id)]
        (tokens,) = tokens_of(model, [prompt], configs[0].decode(id), seeds=seeds)
        kept = before_loop(tokens)
        assert answer == {"role": "assistant", "content": model.text.decode(kept)}
        assert answered[id]["ends"] == (kept == tokens and tokens[-1] in model.eos)
    assert answered and all(len(row["messages"]) == 2 for row in answered.values())
    file.write_text(file.read_text() + '{"prompt": "y"}\n')
    with pytest.raises(UserError, match="already contains a result with inputs"):
        stage.main(configs[0])


@pytest.mark.parametrize(
    ("turn", "cut"),
    [
        ("How do I do it? I have", "How do I do it?"),
        ("import x\nprint(", "import x\n"),
        ("请问。我", "请问。"),
        ("pi is 3.14 and", ""),
    ],
)
def test_a_user_turn_without_an_end_is_cut(turn: str, cut: str) -> None:
    """Bug: such turns were skipped silently: 545 of 640 prompts of Qwen2.5-Coder-0.5B."""
    assert whole_sentences(turn) == cut


@pytest.mark.parametrize(
    "row", [{"messages": "hello"}, {"messages": [{"content": "x"}]}, {"prompt": ""}]
)
def test_a_row_without_a_prompt_is_one_sentence(row: dict[str, Any]) -> None:
    """It was a traceback."""
    with pytest.raises(UserError, match="prompts must have messages .* got {.*}: "):
        messages_of(row)


def test_documents_become_questions(
    chat_dir: Path, data_folder: Path, tmp_path: Path
) -> None:
    """The prompt is the question and a document's prefix as a block of code."""
    settings = [
        f"model={chat_dir}",
        f"data.path={data_folder}",
        "question=Continue this code.",
        "documents=3",
        "max_new_tokens=8",
        "prefix_min=3",
        "dtype=float32",
    ]
    config = composed(*settings, f"out={tmp_path / 'out'}")
    stage.main(config)
    model = load(chat_dir, "float32")
    source = TrainingDocuments(config)
    for document, row in zip(source.drawn(), rows(config), strict=True):
        prefix = model.text.decode(
            whole_lines(model.text, source.prompt(document), config.prefix_min)
        )
        block = f"```{document.language}\n{prefix.rstrip()}\n```"
        question, answer = row["messages"]
        content = f"Continue this code.\n\n{block}"
        assert question == {"role": "user", "content": content}
        assert row["id"] == document.id and answer["role"] == "assistant"
    with pytest.raises(UserError, match="question must be about the documents"):
        composed(f"model={chat_dir}", "own_prompts=1", "question=Why?", "out=o")
    with pytest.raises(UserError, match="documents must be null with own_prompts"):
        composed(f"model={chat_dir}", "own_prompts=9", "documents=2", "out=o")


@given(st.lists(st.integers(0, 2), max_size=40))
def test_a_text_is_cut_after_the_first_period_of_a_loop(ids: list[int]) -> None:
    def loops(part: list[int]) -> list[int]:
        """The periods that the end of a text repeats, whole and at once."""
        return [
            period
            for period in range(1, len(part))
            if len(part) >= period + max(period, 4)
            and all(
                part[-1 - i] == part[-1 - i - period] for i in range(max(period, 4))
            )
        ]

    kept = before_loop(ids, 4)
    assert kept == ids[: len(kept)]
    cuts = [
        end - max(period, 4)
        for end in range(len(ids) + 1)
        for period in loops(ids[:end])
    ]
    assert len(kept) == min(cuts, default=len(ids))


def test_code_that_an_answer_quotes_again_is_no_loop() -> None:
    """Answers that repeat ten tokens were left out: nine of ten answers with code were."""
    code = list(range(30))
    answer = [*code, 100, 101, *code, 102]
    assert before_loop(answer) == answer
    assert before_loop([7, *code, *code]) == [7, *code]


def test_a_prefix_ends_with_a_line(model: Model) -> None:
    text = model.text
    prompt = text.encode("def f(n):\n    return n")
    whole = text.encode("def f(n):\n")
    assert whole_lines(text, prompt, 3) == whole
    assert whole_lines(text, prompt, len(whole) + 1) == prompt


def test_own_turns_begin_behind_the_users_header(chat_dir: Path) -> None:
    ids = user_header(chat_dir)
    whole = chat_ids(chat_dir, [{"role": "user", "content": "abc"}])
    assert whole[: len(ids)] == ids and len(ids) > 1


def without_texts(
    chat_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Make every answer empty; return the settings of a run of two prompts."""
    file = write_rows(folder / "p.jsonl", [{"prompt": "a = 1"}, {"prompt": "b"}])
    monkeypatch.setattr(
        own_text, "complete", lambda model, prompts, *_: [[]] * len(prompts)
    )
    return [f"model={chat_dir}", f"out={folder}/out", f"prompts=[{file}]"]


def test_a_run_without_a_text_is_an_error(
    chat_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: "0 texts from 2 prompts" was a result, with exit code 0."""
    arguments = without_texts(chat_dir, tmp_path, monkeypatch)
    with pytest.raises(UserError, match="no prompt got a text"):
        stage.main(composed(*arguments))
    assert not (tmp_path / "out").exists()


def test_every_rank_of_a_run_without_a_text_raises_the_error(
    chat_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first rank alone raised it; another rank waited, or ended in a traceback."""
    arguments = without_texts(chat_dir, tmp_path, monkeypatch)
    monkeypatch.setattr(
        "infer.bench.harness.init_workers",
        lambda: WorkerGroup(rank=1, world=2, local=1),
    )
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, src: None)
    (partial_of(tmp_path / "out") / stage.UNITS).mkdir(parents=True)
    with pytest.raises(UserError, match="no prompt got a text") as error:
        stage.main(composed(*arguments))
    assert not isinstance(error.value, RankLocalError)  # the first rank prints it
