"""The settings of infer.regenerate."""

import random
from dataclasses import dataclass, field

from conf.settings.schema import check_settings, is_http_url, setting
from infer.config import DTYPES, DecodeConfig
from infer.engine.sampling import Sampling, seed_from


@dataclass
class DocumentsConfig:
    """The documents to continue."""

    #: finished folder of data_prep with documents to continue, prepared with the model's
    #: tokenizer; null: answer prompts instead
    path: str | None = setting(None, path=True)


@dataclass
class RegenerateConfig:
    """python -m infer.regenerate: training documents or prompts, continued by the model.

    A text depends only on the seed and the id of its document or prompt, not on its batch.
    """

    #: Transformers directory or hub name of the model, with or without adaptive tokens; with
    #: endpoint: the model's name on the server
    model: str = setting(hub="model")
    data: DocumentsConfig = field(default_factory=DocumentsConfig)
    #: prompts to answer: files or hub data sets with messages or questions in their rows
    prompts: list[str] = setting([], path=True)
    #: question to answer about each document, instead of continuing it: the prompt is the
    #: question and the document's prefix as a block of code
    question: str = ""
    #: address of a server with OpenAI's API that answers `prompts`, such as
    #: http://localhost:8000/v1; its key is the environment variable OPENAI_API_KEY. null:
    #: this process answers
    endpoint: str | None = None
    #: time limit of the server for one answer, in seconds
    timeout: float = setting(600.0, above=0)
    #: number of prompts that the model generates itself
    own_prompts: int = setting(0, least=0)
    #: folder to write
    out: str = setting(path=True)
    #: maximum number of tokens to generate per document or prompt
    max_new_tokens: int = setting(256, least=1)
    #: sampling temperature; 0: always the likeliest token
    temperature: float = setting(0.0, least=0)
    #: share of texts to sample at `temperature`; the rest is greedy
    sampled: float = setting(1.0, least=0, most=1)
    #: seed of the choice of documents, their prefixes and sampling
    seed: int = setting(0, least=0)
    #: maximum number of documents, or of prompts from files, drawn by the seed; null: all
    documents: int | None = setting(None, least=1)
    #: shortest prefix of a document, in tokens
    prefix_min: int = setting(16, least=1)
    #: longest prefix of a document, in tokens; lengths are drawn uniformly
    prefix_max: int = setting(64, least=1)
    #: number of texts to decode and save together; with endpoint: concurrent requests
    batch: int = setting(64, least=1)
    #: type of the weights, as in `infer`; int8: rounded weights, faster, only on a CPU
    dtype: str = setting("auto", choices=DTYPES)

    def __post_init__(self) -> None:
        check_settings(self)
        Sampling(self.temperature)  # raises if the temperature is too low
        if (self.data.path is None) == (not self.prompts and not self.own_prompts):
            raise ValueError(
                "data.path must be given, or prompts or own_prompts, got "
                f"{self.data.path}, {self.prompts} and {self.own_prompts}. Give one kind."
            )
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError(
                f"prompts must not repeat a source, got {', '.join(self.prompts)}. Give each once."
            )
        if self.temperature == 0 and self.sampled < 1:
            raise ValueError(
                f"sampled={self.sampled:g} needs a temperature above 0, got temperature=0. "
                "Set temperature=0.8, or omit sampled for greedy texts."
            )
        if self.endpoint is not None:
            self._check_endpoint(self.endpoint)
        if self.question and self.data.path is None:
            raise ValueError(
                "question must be about the documents of data.path, got data.path=null. "
                "Give data.path, or leave question empty."
            )
        if self.documents is not None and not (self.data.path or self.prompts):
            raise ValueError(
                "documents must be null with own_prompts alone, got "
                f"{self.documents}. Set own_prompts to the number of texts."
            )
        if self.prefix_max < self.prefix_min:
            raise ValueError(
                f"prefix_max must be at least prefix_min={self.prefix_min}, "
                f"got {self.prefix_max}. Raise it."
            )

    def _check_endpoint(self, endpoint: str) -> None:
        if not is_http_url(endpoint):
            raise ValueError(
                "endpoint must be an address such as http://localhost:8000/v1, got "
                f"{endpoint!r:.60}"
            )
        if self.data.path is not None or self.own_prompts:
            raise ValueError(
                "endpoint answers prompts, got "
                f"data.path={self.data.path} and own_prompts={self.own_prompts}. Give "
                "only prompts, or omit endpoint."
            )
        if self.dtype != "auto":
            raise ValueError(
                f"dtype must be auto with endpoint, got {self.dtype}: the server chooses the "
                "type of its weights. Omit dtype."
            )

    def decode(self, id: str) -> DecodeConfig:
        """Return the decoding settings of a text: without drafts, for large batches."""
        draw = random.Random(seed_from(self.seed, "sampled", id)).random()
        return DecodeConfig(
            "plain",
            temperature=self.temperature if draw < self.sampled else 0.0,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )
