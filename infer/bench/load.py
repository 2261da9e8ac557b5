"""part=load: measure throughput and latency of concurrent requests, by vLLM's definitions.

    request   ├───────── TTFT ─────────┤─ ITL ─┤── ITL ──┤─ ITL ─┤
              sent                  tokens   tokens    tokens   last tokens
              ├──────────────────────── E2EL ────────────────────┤

TTFT is the time to the first tokens. ITL is the time between two outputs of a request; the tokens
of one step arrive together. TPOT = (E2EL - TTFT) / (tokens - 1) is the time per further token.

In this process the requests of a batch start together, and the next batch starts when the
longest text of the batch has ended. For an endpoint N clients run at once, and each client sends
its next request when its last request is answered.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from conf.errors import UserError, as_user_error
from infer.api import Model, generate
from infer.bench.config import BenchConfig, GsdConfig, LoadConfig, SpeedConfig
from infer.bench.harness import Part, Record, WorkerGroup
from infer.bench.names import PLAIN
from infer.bench.progress import progress
from infer.bench.prompts import Prompt, request_of
from infer.bench.runs import seed_of
from infer.bench.speed import max_k
from infer.bench.statistics import grouped
from infer.config import DecodeConfig
from infer.endpoint import CLIENT_ERRORS, api_key
from infer.engine.runner import duration
from infer.text import Text

ENDPOINT = "endpoint"  # the name of the decoder in the rows of a server
REASONING = ("reasoning_content", "reasoning")  # names of the reasoning in a chunk
RETRIES = 2  # the client library's retries of a request


class LoadPart(Part):
    """part=load. A record is a batch decoded by each decoder, or all requests to an endpoint."""

    title = "load"

    @property
    def tasks(self) -> dict[str, tuple[str, int, int]]:  # type: ignore[override]
        """The prompt set, concurrency and batch of each record. An endpoint has only batch 0."""
        endpoint = self.config.load.endpoint
        return {
            f"{name}-{size:03}-{index:05}": (name, size, index)
            for name, prompts in self.sets.items()
            for size in self.config.load.concurrency
            for index in range(1 if endpoint else len(batches(prompts, size)))
        }

    def load(self, workers: WorkerGroup) -> None:
        """Load the model and warm up, or connect to the endpoint and send one request.

        Raises UserError for an endpoint that does not answer.
        """
        longest = max(
            (prompt for prompts in self.sets.values() for prompt in prompts),
            key=lambda prompt: len(prompt.ids),
        )
        if self.config.load.endpoint:
            if workers.world > 1:
                raise UserError(
                    f"load.endpoint must be measured by one process, got {workers.world} processes. "
                    "Run it without torchrun."
                )
            self._endpoint = Endpoint(self.config, self.directory.text)
            self._endpoint.serve(longest)
            return
        super().load(workers)
        self._decoders = decoders_of(self.config.load, self.config.gsd, self.model)
        sizes = self.config.load.concurrency
        steps = len(sizes) * len(self._decoders)
        with progress("warm-up: load", steps, silent=not workers.first) as advance:
            for size in sizes:
                for decode in self._decoders.values():
                    decode_batch(self.model, decode, [longest] * size, 0)
                    advance()

    def measure(self, task: tuple[str, int, int]) -> Record:
        """Return the time and the requests of a task, by decoder."""
        name, size, index = task
        chunks = batches(self.sets[name], size)
        if self.config.load.endpoint:
            prompts = [prompt for chunk in chunks for prompt in chunk]
            runs = {ENDPOINT: send_all(self._endpoint.serve, prompts, size)}
        else:
            shift = index % len(self._decoders)
            names = list(self._decoders)
            order = [*names[shift:], *names[:shift]]
            runs = {
                decoder: decode_batch(
                    self.model, self._decoders[decoder], chunks[index], self.config.seed
                )
                for decoder in order
            }
            runs = {decoder: runs[decoder] for decoder in names}
        return {"prompt_set": name, "concurrency": size, "runs": runs}

    def result(self, records: Mapping[str, Record], folder: Path) -> dict[str, Any]:
        """Return the rows of the report."""
        return {"rows": rows_of(list(records.values()))}


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Return the prompts in batches of `size`. The first prompts fill up the last batch."""
    count = -(-len(prompts) // size) * size
    filled = [prompts[index % len(prompts)] for index in range(count)]
    return [filled[at : at + size] for at in range(0, count, size)]


def decoders_of(
    load: LoadConfig, gsd: GsdConfig, model: Model
) -> dict[str, DecodeConfig]:
    """Return the decoders by name; `gsd` has the settings of a draft model.

    Raises UserError if the model does not support any of them.
    """
    names = [name for name in load.decoders if name != PLAIN]
    speed = replace(
        SpeedConfig(), decoders=names, k=[load.k], max_new_tokens=load.max_new_tokens
    )
    configs = speed.decode_configs(
        load.temperature, max_k=max_k(model), draft=model.draft is not None, gsd=gsd
    )
    if PLAIN not in load.decoders:
        del configs[PLAIN]
    if not configs:
        raise UserError(
            f"load.decoders must have a decoder that this model supports, got {', '.join(names)}. "
            "Add plain, or give draft=."
        )
    return configs


def decode_batch(
    model: Model, decode: DecodeConfig, prompts: Sequence[Prompt], seed: int
) -> Record:
    """Decode prompts as a batch; return the time in seconds and the requests."""
    tokens: list[list[int]] = [[] for _ in prompts]
    arrivals: list[list[float]] = [[] for _ in prompts]
    seeds = [seed_of(prompt, seed) for prompt in prompts]
    began = time.perf_counter()
    for step in generate(
        model, [prompt.ids for prompt in prompts], decode, seeds=seeds
    ):
        arrivals[step.sequence].append(time.perf_counter() - began)
        tokens[step.sequence] += step.tokens
    seconds = duration(began, time.perf_counter())
    requests = [
        request_record(prompt, arrived, len(ids), str(ids))
        for prompt, arrived, ids in zip(prompts, arrivals, tokens)
    ]
    return {"seconds": seconds, "requests": requests}


def request_record(
    prompt: Prompt, arrivals: Sequence[float], tokens: int, text: str
) -> Record:
    """Return a request as JSON: counts of tokens, times of its outputs, a hash of its text."""
    return {
        "prompt": prompt.id,
        "input_tokens": len(prompt.ids),
        "output_tokens": tokens,
        "arrivals": list(arrivals),
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def send_all(
    serve: Callable[[Prompt], Record], prompts: Sequence[Prompt], clients: int
) -> Record:
    """Send the prompts with this number of clients; return the time in seconds and the requests.

    After a request fails, no further request is sent.
    """
    began = time.perf_counter()
    executor = ThreadPoolExecutor(clients)
    try:
        requests = [executor.submit(serve, prompt) for prompt in prompts]
        done, _ = wait(requests, return_when=FIRST_EXCEPTION)
        seconds = duration(began, time.perf_counter())
    finally:
        executor.shutdown(cancel_futures=True)
    for request in done:
        request.result()  # raises the error of a request that failed
    return {"seconds": seconds, "requests": [request.result() for request in requests]}


class Endpoint:
    """An OpenAI-compatible server, measured with streamed completions.

    Prompts that were encoded by the chat template are sent as messages, other prompts as text.
    """

    def __init__(self, config: BenchConfig, text: Text) -> None:
        try:
            from openai import OpenAI
        except ImportError:
            raise UserError(
                "load.endpoint needs the package openai. Install it: pip install openai."
            ) from None
        load = config.load
        self._load = load
        self._seed = config.seed
        self._text = text
        url = load.endpoint or ""
        if not urlsplit(url).path.strip("/"):
            url = f"{url.rstrip('/')}/v1"
        self._url = url
        key = api_key() or "none"
        with CLIENT_ERRORS:
            self._client: Any = OpenAI(
                base_url=url, api_key=key, max_retries=RETRIES, timeout=load.timeout
            )
        self._model = load.model or self._only_model()

    def serve(self, prompt: Prompt) -> Record:
        """Send a request and return its record. Raises UserError for a request that fails."""
        request = request_of(prompt, self._text)
        chat = "messages" in request
        api = self._client.chat.completions if chat else self._client.completions
        arrivals: list[float] = []
        pieces: list[str] = []
        usage = None
        ended = False
        began = time.perf_counter()
        with self._refusing():
            stream = api.create(
                model=self._model,
                max_tokens=self._load.max_new_tokens,
                temperature=self._load.temperature,
                seed=seed_of(prompt, self._seed),
                stream=True,
                stream_options={"include_usage": True},
                **request,
            )
            for chunk in stream:
                now = time.perf_counter() - began
                usage = getattr(chunk, "usage", None) or usage
                ended |= any(choice.finish_reason for choice in chunk.choices)
                if piece := text_of(chunk, chat=chat):
                    arrivals.append(now)
                    pieces.append(piece)
                if now > self._load.timeout:
                    raise TimeoutError(f"no end of a text after {now:.0f} s")
            if not arrivals and not ended:
                raise ValueError("a text without tokens")
        if not arrivals:  # the text ended at once
            arrivals.append(time.perf_counter() - began)
        text = "".join(pieces)
        tokens = usage.completion_tokens if usage else self._tokens_of(text)
        return request_record(prompt, arrivals, max(tokens, 1), text)

    def _tokens_of(self, text: str) -> int:
        return len(self._text.encode(text)) - len(self._text.encode(""))

    def _only_model(self) -> str:
        with self._refusing():
            names = [model.id for model in self._client.models.list()]
        if len(names) != 1:
            raise UserError(
                f"load.model must be a model of load.endpoint={self._url}, got null. "
                f"The server lists: {', '.join(names[:8]) or 'no models'}."
            )
        return str(names[0])

    def _refusing(self) -> as_user_error:
        return as_user_error(
            f"load.endpoint={self._url} must answer within load.timeout="
            f"{self._load.timeout:g} s, got",
            f" (after {RETRIES} retries). Start the server, or correct load.endpoint "
            "and load.model.",
        )


def text_of(chunk: Any, *, chat: bool) -> str:
    """Return the text of a chunk of a stream, including reasoning and calls of functions.

    Servers name the reasoning `reasoning_content`, or `reasoning` (vLLM); some send both names.
    """
    if not chunk.choices:
        return ""
    choice = chunk.choices[0]
    if not chat:
        return choice.text or ""
    delta = choice.delta
    reasoning = (getattr(delta, name, None) for name in REASONING)
    pieces = [delta.content, next(filter(None, reasoning), None)]
    functions = [call.function for call in delta.tool_calls or ()]
    for function in filter(None, [*functions, getattr(delta, "function_call", None)]):
        pieces += [function.name, function.arguments]
    return "".join(filter(None, pieces))


def rows_of(records: Sequence[Record]) -> list[Record]:
    """Return a row for each prompt set, concurrency and decoder, in this order."""
    runs = [
        {
            "prompt_set": record["prompt_set"],
            "concurrency": record["concurrency"],
            "decoder": decoder,
            **run,
        }
        for record in records
        for decoder, run in record["runs"].items()
    ]
    # The text of each prompt by plain decoding, which does not depend on the batch.
    plain = {
        (run["prompt_set"], request["prompt"]): request["text"]
        for run in runs
        if run["decoder"] == PLAIN
        for request in run["requests"]
    }
    rows = []
    for key, group in grouped(runs, "prompt_set", "concurrency", "decoder"):
        columns = dict(zip(("prompt_set", "concurrency", "decoder"), key))
        requests = [request for run in group for request in run["requests"]]
        texts = [
            (request["text"], plain[columns["prompt_set"], request["prompt"]])
            for request in requests
            if (columns["prompt_set"], request["prompt"]) in plain
        ]
        rows.append(
            {
                **columns,
                **figures(requests, sum(run["seconds"] for run in group)),
                "same": sum(own == other for own, other in texts),
                "compared": len(texts),
            }
        )
    return rows


def figures(requests: Sequence[Record], seconds: float) -> Record:
    """Return the figures of requests that took `seconds` in all, by the names of vLLM's JSON."""
    inputs = sum(request["input_tokens"] for request in requests)
    outputs = sum(request["output_tokens"] for request in requests)
    times = {
        "ttft": [request["arrivals"][0] for request in requests],
        "tpot": [
            (request["arrivals"][-1] - request["arrivals"][0])
            / (request["output_tokens"] - 1)
            for request in requests
            if request["output_tokens"] > 1
        ],
        "itl": [
            later - earlier
            for request in requests
            for earlier, later in pairwise(request["arrivals"])
        ],
        "e2el": [request["arrivals"][-1] for request in requests],
    }
    row: Record = {
        "completed": len(requests),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(requests) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name, values in times.items():
        ms = 1e3 * np.array(values)
        row[f"mean_{name}_ms"] = float(ms.mean()) if values else None
        row[f"median_{name}_ms"] = float(np.median(ms)) if values else None
        row[f"p99_{name}_ms"] = float(np.percentile(ms, 99)) if values else None
    return row
