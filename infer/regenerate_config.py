"""The settings of infer.regenerate."""

import random
import re
from dataclasses import dataclass, field

from conf.settings.schema import check_settings, setting
from infer.config import DTYPES, DecodeConfig
from infer.engine.sampling import Sampling, seed_from

ENDPOINT = re.compile(r"https?://[^/\s]+\S*")


@dataclass
class DocumentsConfig:
    """The documents to continue."""

    #: a finished folder of data_prep, with the model's tokenizer; null: prompts are given
    path: str | None = setting(None, path=True)


@dataclass
class RegenerateConfig:
    """python -m infer.regenerate: training documents or prompts, continued by the model.

    A text depends on the seed and the id of its document or prompt, not on its batch.
    """

    #: a Transformers directory or hub name, with or without adaptive tokens; with endpoint:
    #: the model's name, as the server spells it
    model: str = setting(hub="model")
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    #: prompts to answer: files of rows or hub data sets with messages or questions
    prompts: list[str] = setting([], path=True)
    #: answer this question about each document, in place of continuing it: the prompt is
    #: the question and the document's prefix as a block of code
    question: str = ""
    #: address of a server with OpenAI's API that answers `prompts`, such as
    #: http://localhost:8000/v1; its key is the variable OPENAI_API_KEY. null: this machine
    #: answers
    endpoint: str | None = None
    #: seconds that the server may take for an answer
    timeout: float = setting(600.0, above=0)
    #: prompts that the model makes itself
    own_prompts: int = setting(0, least=0)
    #: the folder to write
    out: str = setting(path=True)
    #: tokens to add to a prefix, at most
    max_new_tokens: int = setting(256, least=1)
    #: of sampling; 0: the likeliest token
    temperature: float = setting(0.0, least=0)
    #: share of texts that are sampled at `temperature`; the others are greedy
    sampled: float = setting(1.0, least=0, most=1)
    #: draws the documents, their prefixes and the noise of sampling
    seed: int = setting(0, least=0)
    #: the most documents or prompts of files, drawn by the seed; null: all
    documents: int | None = setting(None, least=1)
    #: the shortest prefix of a document, in tokens
    prefix_min: int = setting(16, least=1)
    #: the longest prefix of a document, in tokens; each length is as likely
    prefix_max: int = setting(64, least=1)
    #: documents that are decoded side by side and saved together; with endpoint: requests
    #: at once
    batch: int = setting(64, least=1)
    #: of the weights; auto: bfloat16 where the device has instructions for it; int8: on a CPU, faster, by
    #: rounded weights
    dtype: str = setting("auto", choices=DTYPES)

    def __post_init__(self) -> None:
        check_settings(self)
        Sampling(self.temperature)  # raises for one that is too low
        if (self.data.path is None) == (not self.prompts and not self.own_prompts):
            raise ValueError(
                "data.path must be given, or prompts or own_prompts, got "
                f"{self.data.path}, {self.prompts} and {self.own_prompts}. Give one kind."
            )
        if self.endpoint is not None:
            self._check_endpoint(self.endpoint)
        if self.question and self.data.path is None:
            raise ValueError(
                "question must be about the documents of data.path, got data.path=null. "
                "Give data.path, or leave question empty."
            )
        if self.prefix_max < self.prefix_min:
            raise ValueError(
                f"prefix_max must be at least prefix_min={self.prefix_min}, "
                f"got {self.prefix_max}. Raise it."
            )

    def _check_endpoint(self, endpoint: str) -> None:
        if not ENDPOINT.fullmatch(endpoint):
            raise ValueError(
                "endpoint must be an address such as http://localhost:8000/v1, got "
                f"{endpoint!r:.60}"
            )
        if self.data.path is not None or self.own_prompts:
            raise ValueError(
                "endpoint answers prompts, got "
                f"data.path={self.data.path} and own_prompts={self.own_prompts}. Give "
                "prompts alone, or leave endpoint away."
            )

    def decode(self, id: str) -> DecodeConfig:
        """How a text is made: without drafts, many side by side."""
        draw = random.Random(seed_from(self.seed, "sampled", id)).random()
        return DecodeConfig(
            "plain",
            temperature=self.temperature if draw < self.sampled else 0.0,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )
