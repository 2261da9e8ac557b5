"""The chat template that training and decoding share."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer

from conf.errors import UserError
from conf.text.chat import ChatTemplate
from conf.text.encoding import TextEncoder
from data_prep.vocab import load_tokenizer
from tests.data_prep.chat_fixture import CHATML, INST, chat_tokenizer, say

# A reasoning model's template: the prompt opens a thought; thoughts of earlier answers are stripped.
THINKING = """{% for m in messages %}{% if m.role == 'assistant' %}\
{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ m.content }}{% else %}\
{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}{{ '<|im_end|>\n' }}\
{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
# A template that also strips the thought of the last answer.
FORGETTING = THINKING.replace("loop.last", "false")
TOOLS = CHATML.replace(
    "message['content'] +", "(message['content'] or message.tool_calls | tojson) +"
).replace("Be brief.", "{{ tools }}")
TEMPLATES = {
    "chatml": CHATML,
    "inst": INST,
    "thinking": THINKING,
    "forgetting": FORGETTING,
    "tools": TOOLS,
}
PIECES = ["<|im_start|>", "<|im_end|>", "</s>", "<s>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {name: chat_tokenizer(root / name, text) for name, text in TEMPLATES.items()}


def load(folder: Path) -> ChatTemplate:
    tokenizer = load_tokenizer(folder)
    encoder = TextEncoder(tokenizer, control=(), rows=None)
    return ChatTemplate(folder, encoder, "tokenizer must have a chat template, got")


CONTENT = st.lists(st.sampled_from([*PIECES, "a", " ", "\n", "</s", ">", "é"]))


@given(
    contents=st.lists(CONTENT.map("".join), min_size=1, max_size=3).filter(
        lambda contents: len(contents) % 2 == 1
    ),
    name=st.sampled_from(["chatml", "inst", "thinking"]),
)
def test_control_pieces_of_messages_are_text(
    folders: dict[str, Path], contents: list[str], name: str
) -> None:
    """Only pieces of the template become control ids, and the text is unchanged.

    If no message spells a control piece, the ids equal the ids of Transformers.
    """
    library: Any = AutoTokenizer.from_pretrained(folders[name])
    control = {library.convert_tokens_to_ids(piece) for piece in PIECES}
    messages = say(*contents)

    def rendered(messages: list[dict[str, str]]) -> str:
        return library.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    ids = load(folders[name]).prompt_ids(messages)
    harmless = say(*["word" for _ in contents])
    expected = library(rendered(harmless), add_special_tokens=False).input_ids
    assert [id for id in ids if id in control] == [
        id for id in expected if id in control
    ]
    assert library.decode(ids) == rendered(messages)
    if not any(piece in text for piece in PIECES for text in contents):
        whole = library(rendered(messages), add_special_tokens=False).input_ids
        assert ids == whole


def test_the_prompt_of_a_reasoning_model_ends_where_the_answer_begins(
    folders: dict[str, Path],
) -> None:
    """Every row was dropped: the generation prompt ended in <think>, but the rendered answer did not.

    An answer that keeps its thought follows the whole prompt.
    """
    messages = say("Add.", "<think>\nA sum.\n</think>\n\nIt is 5.")
    opening = "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
    for name, cut, expected in (
        ("thinking", "<think>\n", "A sum.\n</think>\n\nIt is 5.<|im_end|>\n"),
        ("forgetting", "", "It is 5.<|im_end|>\n"),
    ):
        library: Any = AutoTokenizer.from_pretrained(folders[name])
        template = load(folders[name])
        chat = template.prepare(messages)
        prompt, answer = template.answer_ids(chat, 1)
        assert library.decode(prompt) == opening + cut
        assert library.decode(answer) == expected
        _, unended = template.answer_ids(chat, 1, ends=False)
        assert library.decode(unended) == expected.removesuffix("<|im_end|>\n")


def test_an_answer_that_begins_like_a_thought_is_not_cut_in_its_middle(
    folders: dict[str, Path],
) -> None:
    library: Any = AutoTokenizer.from_pretrained(folders["forgetting"])
    template = load(folders["forgetting"])
    prompt, answer = template.answer_ids(template.prepare(say("a", "<table>")), 1)
    assert library.decode(prompt).endswith("<|im_start|>assistant\n")
    assert library.decode(answer) == "<table><|im_end|>\n"


def test_roles_and_calls_that_a_template_does_not_support(
    folders: dict[str, Path],
) -> None:
    """The template would silently drop tool calls. The role developer becomes system."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "</s>"}}}
    calling = [*say("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="does not support tool_calls"):
        load(folders["chatml"]).prepare(calling)
    with pytest.raises(ValueError, match="does not support tools"):
        load(folders["chatml"]).prepare(say("a"), [call])
    library: Any = AutoTokenizer.from_pretrained(folders["tools"])
    template = load(folders["tools"])
    _, answer = template.answer_ids(template.prepare(calling), 1)
    assert library.decode(answer).count("add") == 1
    assert answer.count(library.convert_tokens_to_ids("</s>")) == 0
    ids = load(folders["chatml"]).prompt_ids(
        [{"role": "developer", "content": "Short."}, *say("a")]
    )
    assert "system\nShort." in AutoTokenizer.from_pretrained(folders["chatml"]).decode(
        ids
    )


def test_an_answer_that_has_begun_keeps_its_line_end(
    folders: dict[str, Path],
) -> None:
    """With some templates Transformers' continue_final_message strips the line end."""
    messages = say("Add.")
    for name in ("chatml", "inst", "thinking", "forgetting"):
        library: Any = AutoTokenizer.from_pretrained(folders[name])
        template = load(folders[name])
        text = library.decode(template.prompt_ids(messages, answer="Sure:\n```</s>\n"))
        assert text.endswith("Sure:\n```</s>\n")
        assert text.count("Add.") == 1 and "<think>" not in text


def test_an_error_of_the_template_is_raised(folders: dict[str, Path]) -> None:
    with pytest.raises(TemplateError, match="alternate"):
        load(folders["inst"]).prompt_ids([*say("a"), *say("b")])


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(UserError, match="must have a chat template, got no chat_temp"):
        load(folder)
