"""Send chat requests to a server with OpenAI's API: vLLM, SGLang, `transformers serve`.

    ask("http://localhost:8000/v1", {name: body}, save, at_once=64, timeout=600)

A body is the JSON of a request to POST URL/chat/completions; the server applies its own chat
template. `save` receives each answer as it arrives, or the reason for its absence. Failed
connections and statuses of a busy or broken server are retried with growing pauses, up to
ATTEMPTS attempts in total. The API key is the environment variable OPENAI_API_KEY, if set.
"""

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from conf.console import print_line
from conf.errors import UserError, as_user_error, in_one_line

ATTEMPTS = 8  # per request; the pauses add up to about a minute
TIMED_OUT = 2  # give up after this many timeouts
PAUSE = 0.5  # seconds after the first attempt, doubled after each
LONGEST_PAUSE = 30.0
CONNECT_SECONDS = 10.0
BUSY = (408, 409, 425, 429)  # retried, like every status from 500 on
# Statuses that concern one request only, for example a prompt longer than the context.
UNFIT = (400, 413, 422)
KEY = "OPENAI_API_KEY"

#: Of making an HTTP client, which reads the variables. The package openai reads the address too.
CLIENT_ERRORS = as_user_error(
    "the address, and the proxies in HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, must be usable, got",
    ". Unset or correct them",
)

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A server's message and its finish reason: "stop", "length", ..."""

    message: Mapping[str, Any]
    finish: str


#: Called with a request's name, and its answer or the reason for its absence.
Save = Callable[[str, Answer | str], None]


class AttemptError(Exception):
    """A failed attempt that may be repeated.

    The message is the end of a sentence. `status` is None without a response. `pause` is
    the server's Retry-After in seconds.
    """

    def __init__(
        self, reason: str, status: int | None = None, pause: float | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.pause = pause


class NoConnection(AttemptError):
    """The server's address accepts no connection."""


class LateAnswer(AttemptError):
    """No answer within the timeout."""


class Refusal(Exception):
    """A request that the server refused, with the status and the server's message."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status


def ask(
    url: str,
    bodies: Mapping[str, Body],
    save: Save,
    *,
    at_once: int,
    timeout: float,
) -> None:
    """Send all requests, `at_once` concurrently, and call `save` for each answer.

    Raises UserError if the server does not respond, or refuses the key, the model or the
    short test request. Answers received before an error are saved.
    """
    if not bodies:
        return
    try:
        asyncio.run(_ask(url.rstrip("/"), bodies, save, at_once, timeout))
    except ExceptionGroup as group:  # of concurrent requests; raise the first
        raise group.exceptions[0] from group


def api_key() -> str:
    """Return the value of OPENAI_API_KEY, "" if it is not set.

    Raises UserError for a key that a header cannot have.
    """
    key = os.environ.get(KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{KEY} must have printable ASCII characters only. Copy the key again."
        )
    return key


async def _ask(
    url: str,
    bodies: Mapping[str, Body],
    save: Save,
    at_once: int,
    timeout: float,
) -> None:
    key = api_key()
    with CLIENT_ERRORS:
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=at_once),
        )
    async with client:
        endpoint = Endpoint(client, url, timeout)
        first = next(iter(bodies.values()))
        # Greedy requests have no seed, but the server may refuse a seed.
        await endpoint.check(next((b for b in bodies.values() if "seed" in b), first))
        waiting = iter(bodies.items())
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(bodies))):
                group.create_task(_work(endpoint, waiting, save))


async def _work(
    endpoint: "Endpoint",
    waiting: Iterator[tuple[str, Body]],
    save: Save,
) -> None:
    """Send requests one after another until `waiting` is empty."""
    for name, body in waiting:
        answer: Answer | str
        try:
            answer = await endpoint.answer(body)
        except Refusal as error:
            if error.status not in UNFIT:
                raise endpoint.refused(error, body) from error
            answer = str(error)
        except AttemptError as error:
            await endpoint.explain(error, body)
            answer = str(error)
        save(name, answer)


class Endpoint:
    """A server at `url`, with the HTTP client for its requests."""

    def __init__(self, client: httpx2.AsyncClient, url: str, timeout: float) -> None:
        self._client = client
        self._url = url
        self._timeout = timeout
        self._takes_seeds = True

    async def check(self, body: Body) -> None:
        """Request one token with the settings of `body`; note if the server refuses seeds.

        Raises UserError if the server does not answer.
        """
        try:
            await self.answer(_short(body), patient=False)
        except Refusal as error:
            if "seed" in body and "seed" in str(error).lower():
                self._takes_seeds = False
                print_line(
                    f"endpoint: {self._url} takes no seed, so sampled answers differ in "
                    f"every run: {error}",
                    error=True,
                )
                await self.check({k: v for k, v in body.items() if k != "seed"})
                return
            raise self.refused(error, body, await self._models()) from error
        except AttemptError as error:
            raise self._unreachable(error) from error

    async def answer(self, body: Body, *, patient: bool = True) -> Answer:
        """Return the answer to a request, with retries.

        With patient=False a failed connection is not retried. Raises Refusal, or the
        AttemptError of the last attempt.
        """
        if not self._takes_seeds:
            body = {name: value for name, value in body.items() if name != "seed"}
        late = 0
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._attempt(body)
            except AttemptError as error:
                late += isinstance(error, LateAnswer)
                impatient = isinstance(error, NoConnection) and not patient
                if attempt == ATTEMPTS or late == TIMED_OUT or impatient:
                    raise
                await asyncio.sleep(pause_after(attempt, error.pause))
        raise AssertionError("the last attempt returns or raises")

    async def explain(self, error: AttemptError, body: Body) -> None:
        """Return if the server answers a short request; otherwise raise UserError.

        If it does, only this request fails, not the server.
        """
        if error.status is None:
            raise self._unreachable(error) from error
        try:
            await self.answer(_short(body))
        except (AttemptError, Refusal) as again:
            raise self._unreachable(error) from again

    def refused(self, error: Refusal, body: Body, models: str = "") -> UserError:
        """Return the error for a refusal that concerns all requests, with its cure."""
        if error.status in (401, 403):
            cure = f"Set {KEY} to a key that the server accepts"
        elif error.status in UNFIT:
            cure = (
                "Change what the server names, or give the model's name as the server "
                f"spells it{models}"
            )
        else:
            cure = (
                "Give the server's address up to /v1, and the model's name as the "
                f"server spells it{models}"
            )
        return UserError(
            f"endpoint={self._url} refused a request for model={body['model']}: "
            f"{error}. {cure}."
        )

    def _unreachable(self, error: AttemptError) -> UserError:
        if isinstance(error, LateAnswer):
            cure = f"Raise timeout={self._timeout:g}, or lower batch"
        elif error.status is not None:
            cure = "Read the server's log"
        else:
            cure = "Start the server, or correct the address"
        return UserError(
            f"endpoint={self._url} did not answer: {error}. {cure}. The same command "
            "continues with the answers that were saved."
        )

    async def _attempt(self, body: Body) -> Answer:
        """Send a request once. Raises AttemptError or Refusal."""
        try:
            response = await self._client.post(
                f"{self._url}/chat/completions",
                content=json.dumps(body).encode(),  # ASCII, so lone surrogates pass
                headers={"Content-Type": "application/json"},
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.InvalidURL) as error:
            raise NoConnection(in_one_line(error)) from error
        except httpx2.TimeoutException as error:
            raise LateAnswer(f"no answer within {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            raise AttemptError(in_one_line(error)) from error
        status = response.status_code
        if status in BUSY or status >= 500:
            reason = f"HTTP {status}: {words_of(response)}"
            raise AttemptError(reason, status, _retry_after(response))
        if status != httpx2.codes.OK:
            raise Refusal(status, words_of(response))
        try:
            choice = response.json()["choices"][0]
            message = dict(choice["message"])
            message["content"] = _text(message.get("content"))
            return Answer(message, str(choice["finish_reason"]))
        except (ValueError, LookupError, TypeError) as error:
            reason = f"no answer in the response {response.text!r:.200}"
            raise AttemptError(reason, status) from error

    async def _models(self) -> str:
        """Return the server's model names in parentheses, "" if it lists no model."""
        try:
            response = await self._client.get(f"{self._url}/models")
            names = [str(row["id"]) for row in response.json()["data"]]
        except (httpx2.RequestError, ValueError, LookupError, TypeError):
            return ""
        return f" ({', '.join(names[:5])})" if names else ""


def pause_after(attempt: int, retry_after: float | None = None) -> float:
    """Return the seconds to wait after attempt 1, 2, ...: PAUSE, doubled each time, with jitter.

    A larger `retry_after`, the wait that the server asks for, replaces it, up to LONGEST_PAUSE.
    """
    pause: float = min(LONGEST_PAUSE, PAUSE * 2 ** (attempt - 1))
    pause *= random.uniform(0.75, 1.25)
    return max(pause, min(retry_after or 0.0, LONGEST_PAUSE))


def words_of(response: httpx2.Response) -> str:
    """Return a response's error message: {"error": {"message"}}, {"detail"}, or its text."""
    try:
        body = response.json()
        error = body.get("error", body)
        if isinstance(error, Mapping):
            error = error.get("message") or error.get("detail") or error
    except (ValueError, AttributeError):
        error = response.text
    words = " ".join(str(error).split()).rstrip(".")
    return f"{words:.300}" or response.reason_phrase


def _text(content: Any) -> str:
    """Return a message's content as one text; some servers divide it into typed parts."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = (p.get("text", "") if isinstance(p, Mapping) else p for p in parts)
    return "".join(texts)


def _retry_after(response: httpx2.Response) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):  # absent, or a date
        return None


def _short(body: Body) -> dict[str, Any]:
    """Return a request for one token with a body's settings, which every chat model can answer."""
    settings = {name: value for name, value in body.items() if name != "tools"}
    hello = [{"role": "user", "content": "Hello"}]
    return settings | {"messages": hello, "max_tokens": 1}
