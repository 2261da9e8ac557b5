"""The model card's commands for other projects' servers, and what these read from config.json."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tests.train.export.readers import tensorrt_mask_id, vllm_mask_id

FOLDER = Path(__file__).parents[3] / "train" / "export"
IDS = st.integers(0, 999)
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def rendered(**changes: Any) -> str:
    """Return the part of the model card."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = {
        "path": "ORG/NAME",
        "identical": True,
        "mask_token_id": 6,
        "k": 5,
        "gated": False,
    }
    return environment.get_template("serving.md.j2").render(
        **{**known, "exported": {"dtype": "bfloat16"}, **changes}
    )


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Return the arguments of every command in the shell blocks."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def called(block: str) -> dict[str, Any]:
    """Return the arguments of the classes in a Python block."""
    arguments = dict[str, Any]()

    def stand_in(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments[name] = (args, kwargs)
            answer = SimpleNamespace(outputs=[SimpleNamespace(text="")])
            return SimpleNamespace(
                generate=lambda *_: [answer] if "vllm" in block else answer
            )

        return call

    names = ("LLM", "SamplingParams", "PARDDecodingConfig")
    body = "\n".join(
        line for line in block.splitlines() if not line.startswith("from ")
    )
    known = {"__name__": "__main__", "print": lambda text: None}
    exec(body, {**known, **{name: stand_in(name) for name in names}})
    return arguments


def test_the_model_drafts_for_itself_one_token_more_than_k() -> None:
    text = rendered()
    (serve, sglang) = commands(text)
    drafting = json.loads(serve[serve.index("--speculative-config") + 1])
    expected = {
        "method": "draft_model",
        "model": "ORG/NAME",
        "num_speculative_tokens": 6,
        "parallel_drafting": True,
    }
    assert serve[:3] == ["vllm", "serve", "ORG/NAME"] and drafting == expected
    vllm, tensorrt = map(called, blocks(text, "python"))
    assert vllm["LLM"] == (("ORG/NAME",), {"speculative_config": expected})
    drafts = {"max_draft_len": 6, "speculative_model": "ORG/NAME", "mask_token_id": 6}
    assert tensorrt["PARDDecodingConfig"] == ((), drafts)
    assert sglang[:3] == ["python", "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identical": False}, "an adaptive token for each"),
        ({"gated": True}, "the base model's weights"),
        ({"identical": False, "mask_token_id": None, "k": None}, "as a plain model"),
    ],
    ids=["diverse", "gated", "no adaptive tokens"],
)
def test_what_cannot_be_drafted_there_is_served_plainly(
    changes: dict[str, Any], said: str
) -> None:
    text = rendered(**changes)
    assert said in text and "draft_model" not in text and "PARD" not in text
    assert [command[0] for command in commands(text)] == [
        "vllm",
        "trtllm-serve",
        "python",
    ]
    assert ("so nothing is drafted" in " ".join(text.split())) == (
        "plain model" not in said
    )


def test_float32_is_requested() -> None:
    """By default vLLM and SGLang serve float32 weights in 16 bits."""
    assert "float32" not in rendered() and "float32" not in rendered(gated=True)
    for text in (
        rendered(exported={"dtype": "float32"}),
        rendered(exported={"dtype": "float32"}, gated=True),
    ):
        assert all(
            "float32" in command
            for command in commands(text)
            if command[0] != "trtllm-serve"
        )
    llm = called(blocks(rendered(exported={"dtype": "float32"}), "python")[0])["LLM"]
    assert llm[1]["dtype"] == "float32"


@given(st.dictionaries(st.sampled_from(["model_type", "bos_token_id"]), IDS), IDS)
def test_both_keys_are_found_by_both_readers(config: dict[str, int], mask: int) -> None:
    """Without the keys TensorRT-LLM takes a row that is not there."""
    config["vocab_size"] = 1000
    assert tensorrt_mask_id(config) == 1000
    with pytest.raises(ValueError, match="got none"):
        vllm_mask_id(config)
    for keys in (("pard_token", "ptd_token_id"), ("pard_token",)):
        written = config | dict.fromkeys(keys, mask)
        assert vllm_mask_id(written) == tensorrt_mask_id(written) == mask
    assert vllm_mask_id(config | {"ptd_token_id": mask}) == mask


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@given(st.dictionaries(st.sampled_from(MASKS), IDS), st.none() | IDS)
def test_the_rule_is_vllms_own(config: dict[str, Any], dflash: int | None) -> None:
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    if dflash is not None:
        config = config | {"dflash_config": {"mask_token_id": dflash}}
    if not config:
        with pytest.raises(ValueError, match="must specify"):
            get_parallel_drafting_token_id(SimpleNamespace())
        return
    assert get_parallel_drafting_token_id(SimpleNamespace(**config)) == vllm_mask_id(
        config
    )
