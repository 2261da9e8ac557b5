"""vLLM as a peer: plain decoding, and parallel drafting by our model itself, in vLLM's own engine.

With the target as its own draft model `parallel_drafting` feeds [last token, mask x (K - 1)], which is SDSAT's
drafting forward with K = k + 1 drafts: the first is the model's own next token, so greedy it is always right,
and vLLM counts it as drafted and accepted. It needs one adaptive id for all places and no gated adapter. The
drafting engine holds the weights twice, and its cache too.

Run with vLLM 0.32.0 on a CPU (`python -m tests.drills.serve_vllm`), never on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from conf.clock import duration
from infer.benchmarks.prompts import TokenPrompt
from infer.engine.sampling import Sampling
from infer.measure.runs import Decoder, Run, clock, seed_of
from infer.models import parallel
from infer.models.checkpoint import Adaptive

VLLM = "vllm"
SHARE = 0.2  # of the GPU's memory, for weights and cache once: our own models lie there too
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")  # of vLLM's metrics vllm:spec_decode_num_...
# In 0.32.0 and 0.33.0: vllm-project/vllm issue 55005.
UNSAMPLED = (
    "wanted greedy decoding with drafts on a CPU, found a temperature, which vLLM reads there from memory that "
    "it has not written"
)


def missing(adaptive: Adaptive | None) -> str | None:
    """Why there can be no peer; None where there can."""
    if find_spec("vllm") is None:
        return "wanted vLLM, found it not installed"
    if parallel.place()[1] > 1:
        return "wanted one process, found more, of which each would serve on its own"
    if adaptive is None:
        return "wanted a model with adaptive tokens, found none"
    if adaptive.gated or len(adaptive.ids) > 1:
        found = "an adapter that acts on probes alone" if adaptive.gated else f"{len(adaptive.ids)} of them"
        return f"wanted one adaptive token in the model's own weights, found {found}"
    return None


@dataclass(frozen=True)
class Engines:
    """An engine by number k of adaptive tokens, 0 of plain decoding; loaded once for all samplings. `undrafted`
    says why there is none but the plain one.
    """

    by_k: Mapping[int, Any]
    undrafted: str | None = None

    def decoders(
        self, *, sampling: Sampling, max_new_tokens: int, seed: int = 0
    ) -> tuple[dict[int, Decoder], str | None]:
        """By k; and why those with drafts are not among them."""
        settings = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "max_tokens": max_new_tokens,
            "detokenize": False,
        }

        def decoder(engine: Any) -> Decoder:
            return lambda prompt: _run(engine, prompt, {**settings, "seed": seed_of(prompt, seed)})

        right = not sampling.temperature or torch.cuda.is_available()
        found = {k: decoder(engine) for k, engine in self.by_k.items() if right or not k}
        return found, None if len(found) == len(self.by_k) else UNSAMPLED


def load_engines(model: str, adaptive: Adaptive | None, k: int, *, dtype: str, capacity: int) -> Engines | str:
    """Two, for texts of up to `capacity` tokens, that have decoded a prompt, or the plain one alone; or why
    there are none.
    """
    reason = missing(adaptive)
    if reason:
        return reason
    drafting = {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": k + 1,
        "parallel_drafting": True,
    }

    settings = {"model": model, "dtype": dtype, "max_model_len": capacity}
    try:
        plain = _load(settings | {"gpu_memory_utilization": SHARE}, None)
    except Exception as error:  # whatever vLLM lacks or calls otherwise: the others' figures are not lost
        return _why(error)
    try:
        return Engines({0: plain, k: _load(settings | {"gpu_memory_utilization": 2 * SHARE}, drafting)})
    except Exception as error:
        return Engines({0: plain}, undrafted=_why(error))


def _why(error: Exception) -> str:
    told = next(iter(str(error).splitlines()), "")
    return f"wanted vLLM to load the model and decode a prompt, found {type(error).__name__}: {told}"


def _load(settings: Mapping[str, Any], drafting: Mapping[str, Any] | None) -> Any:
    """An engine that has decoded a prompt."""
    from vllm import LLM

    engine = LLM(
        **settings,
        max_num_seqs=1,
        enable_prefix_caching=False,  # a prompt is read anew in every round
        disable_log_stats=False,  # the time to the first token is among them
        speculative_config=drafting,
    )
    _run(engine, TokenPrompt("try", (0,), frozenset(), "", ""), {"temperature": 0.0, "max_tokens": 2})
    return engine


def _run(engine: Any, prompt: TokenPrompt, settings: Mapping[str, Any]) -> Run:
    """EOS ends a text as vLLM reads it from the directory. Of drafts vLLM tells the sums, not the steps; the
    time to the first token is 0 where it does not tell it.
    """
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
        first_seconds=getattr(output.metrics, "first_token_latency", 0.0) or 0.0,
        first_tokens=1,
        rows=forwards + 3 * drafted,
        verifications=drafts,
        levels=drafted,
    )


def _counts(engine: Any) -> tuple[int, int, int]:
    """Drafts, tokens in them, and accepted ones, since the engine began."""
    found = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    drafts, drafted, accepted = (int(found.get(f"vllm:spec_decode_num_{name}", 0)) for name in COUNTED)
    return drafts, drafted, accepted
