"""Peers: the library's own decoding of the same model, as decoders beside ours.

    generate                   one token a forward
    generate prompt lookup     10 drafts are copied from behind an earlier n-gram, n up to 2 (Saxena, 2023)
    generate assisted          the draft model drafts a chain (Leviathan et al., 2022) as the library has it by
                               default: up to 20 tokens, fewer where it is less than 0.4 sure of one

With the library's own attention and cache, in shapes as they come. Greedy they give the tokens of plain
decoding, up to near-ties, of which our own picks look again in float32. Sampled they draw from the same
distribution with other random numbers, and so they give other texts.

    vllm                       plain decoding, and parallel drafting by our model itself, in vLLM's own engine

With the target as its own draft model `parallel_drafting` feeds [last token, mask x (K - 1)], which is SDSAT's
drafting forward with K = k + 1 drafts: the first is the model's own next token, so greedy it is always right,
and vLLM counts it as drafted and accepted. It needs one adaptive id for all places and no gated adapter. The
drafting engine holds the weights twice, and its cache too.

Run with vLLM 0.32.0 on a CPU (docs/serving.md), never on a GPU.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from logging import getLogger
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from conf.errors import visible
from infer.benchmarks.prompts import TokenPrompt
from infer.engine.runner import duration
from infer.engine.sampling import Sampling
from infer.measure.runs import Decoder, Run, clock, seed_of
from infer.methods import LOOKED_UP
from infer.models import parallel
from infer.models.checkpoint import Adaptive, eos_ids
from infer.models.draft import STAND_IN, Draft
from infer.models.parallel import is_first
from infer.speed import PEERS, Condition, DecoderSpec, SpeedConfig

GENERATE, LOOKUP, ASSISTED = "generate", "generate prompt lookup", "generate assisted"


def peer_decoders(
    lm: PreTrainedModel,
    draft: Draft | None,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    capacity: int,
    seed: int = 0,
) -> tuple[dict[str, Decoder], dict[str, str]]:
    """Return the library's decoders by name for texts up to `capacity` tokens, and why others cannot be."""

    def decoder(draft: Draft | None = None, **settings: Any) -> Decoder:
        settings |= {"max_new_tokens": max_new_tokens, "do_sample": sampling.temperature > 0}
        if sampling.temperature:
            settings |= asdict(sampling)
        return lambda prompt: _run(lm, draft, prompt, settings, seed_of(prompt, seed))

    decoders = {GENERATE: decoder(), LOOKUP: decoder(prompt_lookup_num_tokens=LOOKED_UP)}
    if draft is not None and draft.context >= capacity:
        return decoders | {ASSISTED: decoder(draft)}, {}
    lack = f" of {capacity} positions, got {draft.context}" if draft else ", got none"
    return decoders, {ASSISTED: f"it needs a draft model{lack}"}


def _run(
    lm: PreTrainedModel, draft: Draft | None, prompt: TokenPrompt, settings: dict[str, Any], seed: int
) -> Run:
    """Decode a prompt. A forward is a step; of the first, which has the whole prompt, the last row counts."""
    ends = sorted(eos_ids(lm) | prompt.ends)
    if prompt.max_new_tokens:
        settings = settings | {"max_new_tokens": prompt.max_new_tokens}
    config = GenerationConfig(**settings, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
    ids, heard, rows = torch.tensor([prompt.ids], device=lm.device), _Streamer(), list[int]()
    count = lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1])  # noqa: E731
    with _as_the_library_has_it(lm), ExitStack() as stack:
        assistant = stack.enter_context(_assistant(draft, lm)) if draft else None
        torch.manual_seed(seed)
        began = clock()
        with lm.register_forward_pre_hook(count, with_kwargs=True):
            lm.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=heard,
                assistant_model=assistant,
            )
        seconds = duration(began, clock())
    rows[0] -= len(prompt.ids) - 1
    accepts = tuple(len(step) - 1 for step in heard.steps)
    return Run(
        [token for step in heard.steps for token in step],
        seconds,
        len(rows),
        sum(rows) - len(rows),
        sum(accepts),
        first_seconds=heard.first - began,
        first_tokens=len(heard.steps[0]),
        rows=sum(rows),
        verifications=sum(row > 1 for row in rows),
        levels=sum(rows) - len(rows),
        depths=tuple(row - 1 for row in rows),
        accepts=accepts,
    )


class _Streamer(BaseStreamer):
    """The tokens of each step, and when the first were there; the library hands over the prompt before them."""

    def __init__(self) -> None:
        self.first, self._steps = 0.0, list[list[int]]()

    @property
    def steps(self) -> list[list[int]]:
        return self._steps[1:]

    def put(self, value: Tensor) -> None:
        """Record tokens, already on the host: what they waited for is done."""
        if self._steps:
            self.first = self.first or time.perf_counter()
        self._steps.append(value.flatten().tolist())

    def end(self) -> None:
        pass


@contextmanager
def _as_the_library_has_it(lm: PreTrainedModel) -> Iterator[None]:
    """Decode with none of a directory's generation settings, such as penalties: our loop has none."""
    settings, verbosity = lm.generation_config, logging.get_verbosity()
    lm.generation_config = GenerationConfig()
    logging.set_verbosity_error()  # it warns of how its own code calls itself
    try:
        yield
    finally:
        lm.generation_config = settings
        logging.set_verbosity(verbosity)


@contextmanager
def _assistant(draft: Draft, target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Give the draft model the target's vocabulary while the block lasts, as the library requires.

    Ids that it does not have get logits of -inf, and are read as its stand-in.
    """
    lm, width = draft.lm, target.config.vocab_size
    own = lm.config.vocab_size

    def read(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"]
        return args, {**kwargs, "input_ids": ids.masked_fill(ids >= draft.rows, STAND_IN)}

    def widen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits = F.pad(output.logits, (0, width - output.logits.shape[-1]), value=float("-inf"))
        return output

    with ExitStack() as stack:
        stack.enter_context(_as_the_library_has_it(lm))
        if draft.rows < width:
            stack.enter_context(lm.register_forward_pre_hook(read, with_kwargs=True))
            stack.enter_context(lm.register_forward_hook(widen, with_kwargs=True))
        lm.config.vocab_size = width
        stack.callback(setattr, lm.config, "vocab_size", own)
        yield lm


VLLM = "vllm"
SHARE = 0.2  # of the GPU's memory, for weights and cache once: our own models lie there too
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")  # of vLLM's metrics vllm:spec_decode_num_...
# In 0.32.0 and 0.33.0: vllm-project/vllm issue 55005.
UNSAMPLED = (
    "it drafts greedily on a CPU, got a temperature, which vLLM reads there from memory that it has not written"
)


def missing(adaptive: Adaptive | None) -> str | None:
    """Return why there can be no peer; None where there can."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if parallel.place()[1] > 1:
        return "it needs one process, got more, of which each would serve on its own"
    if adaptive is None:
        return "it needs a model with adaptive tokens, got none"
    reason = "an adapter that acts on probes alone" if adaptive.gated else f"{len(adaptive.ids)} of them"
    right = len(adaptive.ids) == 1 and not adaptive.gated
    return None if right else f"it needs one adaptive token in the model's own weights, got {reason}"


@dataclass(frozen=True)
class Engines:
    """Engines by number k of adaptive tokens, 0 of plain decoding; `undrafted`: why there is only that one."""

    by_k: Mapping[int, Any]
    undrafted: str | None = None

    def decoders(
        self, *, sampling: Sampling, max_new_tokens: int, seed: int = 0
    ) -> tuple[dict[int, Decoder], str | None]:
        """Return decoders by k; and why those with drafts are not among them."""
        settings = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "max_tokens": max_new_tokens,
            "detokenize": False,
        }

        def decoder(engine: Any) -> Decoder:
            return lambda prompt: _run_vllm(engine, prompt, {**settings, "seed": seed_of(prompt, seed)})

        right = not sampling.temperature or torch.cuda.is_available()
        served = {k: decoder(engine) for k, engine in self.by_k.items() if right or not k}
        return served, None if len(served) == len(self.by_k) else UNSAMPLED


def load_engines(model: str, adaptive: Adaptive | None, k: int, *, dtype: str, capacity: int) -> Engines | str:
    """Load a plain engine and a drafting one for texts of up to `capacity` tokens, or the plain one alone; or
    return why there are none.
    """
    reason = missing(adaptive)
    if reason:
        return reason
    drafting = {"method": "draft_model", "model": model, "num_speculative_tokens": k + 1}
    engines = dict[int, Any]()
    for number, share, method in ((0, SHARE, None), (k, 2 * SHARE, drafting | {"parallel_drafting": True})):
        try:
            from vllm import LLM

            engine = engines[number] = LLM(
                model=model,
                dtype=dtype,
                max_model_len=capacity,
                gpu_memory_utilization=share,
                max_num_seqs=1,
                enable_prefix_caching=False,  # a prompt is read anew in every round
                disable_log_stats=False,  # the time to the first token is among them
                speculative_config=method,
            )
            prompt = TokenPrompt("try", (0,), frozenset(), "", "")
            _run_vllm(engine, prompt, {"temperature": 0.0, "max_tokens": 2})
        except Exception as error:  # whatever vLLM lacks or calls otherwise: the others' figures are not lost
            engines.pop(number, None)
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"vLLM must load the model and decode a prompt, got {type(error).__name__}: {first_line}"
            return Engines(engines, undrafted=reason) if engines else reason
    return Engines(engines)


def _run_vllm(engine: Any, prompt: TokenPrompt, settings: Mapping[str, Any]) -> Run:
    """Decode a prompt. EOS ends a text as vLLM reads it from the directory; vLLM reports sums of drafts."""
    from vllm import SamplingParams

    if prompt.max_new_tokens:
        settings = {**settings, "max_tokens": prompt.max_new_tokens}
    params = SamplingParams(**settings, stop_token_ids=sorted(prompt.ends))
    before, began = _counts(engine), clock()
    (output,) = engine.generate([{"prompt_token_ids": list(prompt.ids)}], params, use_tqdm=False)
    seconds = duration(began, clock())
    tokens = list(output.outputs[0].token_ids)
    drafts, drafted, accepted = (after - was for was, after in zip(before, _counts(engine)))
    # The first token is the prompt's. Each other one is a forward's; or a step is two forwards of the same
    # weights: K + 1 rows are verified, then read again with the last token and K - 1 masks behind them.
    forwards = 1 + 2 * drafts if drafts else len(tokens)
    return Run(
        tokens,
        seconds,
        forwards,
        drafted,
        accepted,
        first_seconds=getattr(output.metrics, "first_token_latency", 0.0) or 0.0,  # 0: not reported
        first_tokens=1,
        rows=forwards + 3 * drafted,
        verifications=drafts,
        levels=drafted,
    )


def _counts(engine: Any) -> tuple[int, int, int]:
    metrics = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    drafts, drafted, accepted = (int(metrics.get(f"vllm:spec_decode_num_{name}", 0)) for name in COUNTED)
    return drafts, drafted, accepted


class Peers:
    """Of the models of all dtypes, for texts of up to `capacity` tokens; `sampling` is that of a temperature.

    `by_group` has the decoders of a dtype and a temperature; `left_out` says by a peer's name why it is not
    there, or not everywhere.
    """

    def __init__(
        self,
        config: SpeedConfig,
        lms: Mapping[str, PreTrainedModel],
        drafts: Mapping[str, Draft],
        adaptive: Adaptive | None,
        *,
        sampling: Callable[[float], Sampling],
        capacity: int,
    ) -> None:
        self.left_out = dict[str, str]()
        self.by_group = dict[Condition, dict[DecoderSpec, Decoder]]()
        chosen, new, seed = [PEERS[name] for name in config.peers], config.max_new_tokens, config.seed
        k = adaptive.L if adaptive else 0
        for dtype, lm in lms.items():
            engines: Engines | str = Engines({})
            if VLLM in config.peers:
                engines = load_engines(config.model, adaptive, k, dtype=dtype, capacity=capacity)
            if isinstance(engines, str):
                self._leave_out(VLLM, engines)
                engines = Engines({})
            if engines.undrafted:
                self._leave_out(f"{VLLM} with drafts", engines.undrafted)
            for temperature in config.temperatures:
                how = sampling(temperature)
                own, reasons = peer_decoders(
                    lm, drafts.get(dtype), sampling=how, max_new_tokens=new, capacity=capacity, seed=seed
                )
                for name in reasons.keys() & set(chosen):
                    self._leave_out(name, reasons[name])
                served, unsampled = engines.decoders(sampling=how, max_new_tokens=new, seed=seed)
                if unsampled:
                    self._leave_out(f"{VLLM} with drafts at a temperature", unsampled)
                decoders = {DecoderSpec(name): decoder for name, decoder in own.items() if name in chosen}
                decoders |= {DecoderSpec(VLLM, k): decoder for k, decoder in served.items()}
                self.by_group[Condition(dtype, temperature)] = decoders

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self.left_out and is_first():
            getLogger(__name__).warning("peers: %s is left out: %s", name, visible(reason))
        self.left_out.setdefault(name, reason)
