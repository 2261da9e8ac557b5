"""Which prompts are taken, and where they end."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError
from infer.benchmarks import PromptSetConfig
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.text import Text
from tests.infer.benchmarks.test_kinds import LINE, lines


def test_the_seed_alone_chooses(data_folder: Path, text: Text) -> None:
    config = PromptSetConfig(path=str(data_folder / "held_out.jsonl"), key="content", share=0.5, count=3)
    first = load_prompts("mine", config, text, seed=0)
    assert first == load_prompts("mine", config, text, seed=0) != load_prompts("mine", config, text, seed=1)
    contents = [json.loads(line)["content"] for line in (data_folder / "held_out.jsonl").open()]
    for prompt in first:
        assert any(whole.startswith(text.decode(prompt.ids)) for whole in contents)


def questions(path: Path, **counts: int) -> str:
    rows = [
        {"question_id": number, "category": category, "turns": [f"{category} " * (number % 7 + 1)]}
        for category, count in counts.items()
        for number in range(1000 * len(category), 1000 * len(category) + count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def categories(prompts: list[TokenPrompt]) -> Counter[str]:
    return Counter(prompt.before.split()[0] for prompt in prompts)


@given(seed=st.integers(0, 99), count=st.integers(1, 22), limit=st.sampled_from([None, 20, 40]))
def test_categories_are_taken_in_turn_while_they_last(
    tmp_path_factory: pytest.TempPathFactory, text: Text, seed: int, count: int, limit: int | None
) -> None:
    path = questions(tmp_path_factory.mktemp("q") / "q.jsonl", qa=3, rag=9, summing=10)

    def load(count: int | None) -> list[TokenPrompt]:
        return load_prompts(
            "q", PromptSetConfig("spec_bench", path, count=count, max_tokens=limit), text, seed=seed
        )

    fitting = load(None)
    assert all(limit is None or len(prompt.ids) <= limit for prompt in fitting)
    if count > len(fitting):
        with pytest.raises(
            UserError, match=rf"prompts\.q\.count must be at most {len(fitting)}, the prompts .* got {count}"
        ):
            load(count)
        return
    selected = load(count)
    assert selected == fitting[:count]
    of = categories(selected)
    assert all(
        of[name] in (max(of.values()), max(of.values()) - 1, all_) for name, all_ in categories(fitting).items()
    )


def test_an_infilling_ends_at_eot_and_tells_what_stands_around_it(tmp_path: Path, infilling_text: Text) -> None:
    path = lines(tmp_path / "a.jsonl", LINE, LINE | {"language": "js"})
    config = PromptSetConfig(path=path, count=None)
    result = load_prompts("infilling", config, infilling_text, seed=0)
    assert sorted(prompt.id for prompt in result) == ["L0", "js/L0"]
    for prompt in result:
        assert (prompt.before, prompt.after) == ("def f():\n", "    return x\n")
        assert len(prompt.ends) == 1 and prompt.ends.isdisjoint(prompt.ids)
    # Without its first tokens an infilling prompt asks for another middle.
    config.truncate = 512
    sentence = r"prompts\.infilling\.truncate must be null for infilling prompts, .* got 512\. Use prompts"
    with pytest.raises(UserError, match=sentence):
        load_prompts("infilling", config, infilling_text, seed=0)


@pytest.mark.parametrize("most", [2, 12, 500])
def test_long_prompts_are_truncated_at_their_beginning(tmp_path: Path, text: Text, most: int) -> None:
    """Prompts of more than 512 tokens were passed over, where GSD truncates them: XSum lost long articles."""
    words = [f"Article: {'word ' * count}\nSummary:" for count in (1, 30, 60)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": item}) for item in words))
    config = PromptSetConfig(path=str(path), count=None)
    whole = load_prompts("mine", config, text, seed=0)
    config.truncate = most
    for long, short in zip(whole, load_prompts("mine", config, text, seed=0), strict=True):
        bos = text.encode("")
        assert len(bos) == 1 and len(short.ids) == min(most, len(long.ids))
        assert short.ids[:1] == long.ids[:1] and short.ids[1:] == long.ids[len(long.ids) - len(short.ids) + 1 :]
        assert long.before.endswith(short.before.lstrip()) and (short == long) == (len(long.ids) <= most)


def test_the_first_share_of_a_benchmark_is_taken_in_its_order(text: Text) -> None:
    """The papers' authors decode the first half of HumanEval, 82 problems; the seed drew others."""
    config = PromptSetConfig(kind="humaneval", first=0.5, count=None, max_new_tokens=512)
    prompts = load_prompts("humaneval", config, text, seed=3)
    assert {prompt.id for prompt in prompts} == {f"HumanEval/{index}" for index in range(82)}
    assert {prompt.max_new_tokens for prompt in prompts} == {512}


def test_too_few_prompts_that_fit_are_reported(data_folder: Path, text: Text) -> None:
    config = PromptSetConfig(path=str(data_folder / "held_out.jsonl"), key="content", count=None, max_tokens=1)
    with pytest.raises(UserError, match="prompts.mine must have a prompt that fits max_tokens=1, got none"):
        load_prompts("mine", config, text, seed=0)
    config.count = 5
    with pytest.raises(UserError, match="prompts.mine.count must be at most 0, .* max_tokens=1, got 5"):
        load_prompts("mine", config, text, seed=0)
