"""Apply generation_config.json of a model directory, in the same way for every command.

applied        the fields of Transformers' logits processors (`PROCESSED`), every id of
               eos_token_id, and stop_strings. The settings `decode.repetition_penalty`,
               `no_repeat_ngram_size`, `min_new_tokens` and `stop` override the file
logged once    sampling and length, which are settings of each command, and unsupported
               ways of decoding, such as beams
ignored        fields that do not change the text

So infer, infer.bench and infer.regenerate give the same text as Transformers with the same
directory and arguments, with custom_generate or without.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from conf.errors import as_user_error
from conf.runs.files import read_json
from infer.config import DecodeConfig

FILE = "generation_config.json"
PROCESSED = (
    *("sequence_bias", "encoder_repetition_penalty", "repetition_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
#: The fields that settings of DecodeConfig override.
OVERRIDDEN = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
#: The fields that the library reads only with do_sample.
SAMPLING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
)
LENGTH = ("max_length", "max_new_tokens", "max_time")
#: The fields that select an unsupported way of decoding, each with its neutral value.
UNSUPPORTED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "num_return_sequences": 1,
}


@dataclass(frozen=True)
class Generation:
    """The settings of a model's generation_config.json that apply to every text."""

    processed: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    def processors(
        self,
        lm: PreTrainedModel,
        decode: DecodeConfig,
        prompt: Sequence[int],
        ends: Collection[int],
    ) -> LogitsProcessorList | None:
        """Return the library's logits processors in its order; None without any.

        The minimum lengths exclude the ids in `ends`.
        """
        values = {name: getattr(decode, name) for name in OVERRIDDEN}
        values = {name: value for name, value in values.items() if value is not None}
        fields = {**self.processed, **values}
        if fields.get("min_new_tokens") is not None:
            fields.pop("min_length", None)  # as the library does
        if not fields:
            return None
        config: Any = GenerationConfig(
            **fields, max_length=len(prompt) + decode.max_new_tokens
        )
        config._eos_token_tensor = (
            torch.tensor(sorted(ends), device=lm.device) if ends else None
        )
        model: Any = lm
        processors: LogitsProcessorList = model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], device=lm.device),
            device=str(lm.device),
        )
        return processors or None


def read_generation(lm: PreTrainedModel, folder: Path) -> Generation:
    """Return the settings of a loaded model; Transformers has read them from `folder`.

    Raises UserError for a damaged file, which Transformers ignores, and for values that the
    library's processors refuse or that produce NaN.
    """
    if (file := folder / FILE).exists():
        read_json(file)
    config = lm.generation_config
    if config is None:
        return Generation()
    stop = config.stop_strings or ()
    problem = f"{file} must have settings that Transformers applies, got"
    with as_user_error(problem, ". Correct it, or remove the setting"):
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(string, str) and string for string in strings):
            raise ValueError(f"stop_strings={stop}")
        processed = {
            name: value
            for name in PROCESSED
            if (value := getattr(config, name, None)) is not None
        }
        generation = Generation(processed, strings)
        _check(lm, generation)
    return generation


def _check(lm: PreTrainedModel, generation: Generation) -> None:
    """Raise ValueError for a field with a processor that fails or returns NaN."""
    for name, value in generation.processed.items():
        alone = Generation({name: value})
        try:
            if not all(map(math.isfinite, _numbers(value))):
                raise ValueError("it is not finite")
            # Some processors act only on the first token of a text, or on the last.
            for length, new in ((1, 256), (2, 256), (2, 1)):
                _try(lm, alone, length, DecodeConfig(max_new_tokens=new))
        except Exception as error:
            raise ValueError(f"{name}={value!r:.60}: {error}") from error


def _try(
    lm: PreTrainedModel, generation: Generation, length: int, decode: DecodeConfig
) -> None:
    """Process scores after a text of `length` zeros. Raises ValueError if they become NaN."""
    processors = generation.processors(lm, decode, [0] * length, [0])
    rows = lm.config.get_text_config().vocab_size
    ids: Any = torch.zeros(1, length, dtype=torch.long, device=lm.device)
    scores: Any = torch.zeros(1, rows, device=lm.device)
    if processors and processors(ids, scores).isnan().any():
        raise ValueError("it makes scores NaN")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


def not_applied(lm: PreTrainedModel, folder: Path) -> str | None:
    """Return a sentence that names the fields of generation_config.json that are not applied."""
    config = lm.generation_config
    if config is None:
        return None
    names = [*(SAMPLING if config.do_sample else ()), *LENGTH]
    by_settings = _list_fields(config, dict.fromkeys(names))
    unsupported = _list_fields(config, UNSUPPORTED)
    reasons = []
    if by_settings:
        reasons.append(
            f"{by_settings} (use settings such as decode.temperature and "
            "decode.max_new_tokens)"
        )
    if unsupported:
        reasons.append(f"{unsupported} (not supported by this decoder)")
    if not reasons:
        return None
    return f"{folder / FILE}: not applied: {'; '.join(reasons)}"


def _list_fields(config: GenerationConfig, neutral: Mapping[str, Any]) -> str:
    """Return a list of the fields that are set to another value than the neutral one."""
    values = {name: getattr(config, name, None) for name in neutral}
    return ", ".join(
        f"{name}={value!r:.60}"
        for name, value in values.items()
        if value is not None and value != neutral[name]
    )
