"""Run SDSAT's published decoder for published_decoder.py; it answers requests on standard input.

    PYTHON published_peer.py CHECKOUT MODEL_DIR DTYPE DEVICE ADAPTIVE_ID

It runs in an environment with the Transformers version of the published code, and does not import this
project. A request is a line of JSON: `ids` of the prompt, `k` adaptive tokens (0: plain decoding), `new`
tokens to emit. The answer has `tokens`, `seconds` of the whole call, and `forwards`.

Two parts of the published code are replaced. Its model wrapper would load a tokenizer. Its tokenizer gives the
end of a text: here no token ends a text, because the published decoder cuts a text at that token in another
way than Transformers does.
"""

import json
import sys
import time
from types import SimpleNamespace

import torch
from torch import nn

MAX_K = 32  # most adaptive tokens in a request


class Wrapper(nn.Module):
    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, input_ids, past_key_values=None, output_orig=True):
        outputs = self.base_model.model(
            input_ids=input_ids, past_key_values=past_key_values
        )
        return outputs, self.base_model.lm_head(outputs[0])


def main() -> None:
    checkout, folder, dtype, device, adaptive = sys.argv[1:]
    sys.path.insert(0, checkout)
    from decoders.autoregression import ARDecoder
    from decoders.model.modeling_llama_kv import LlamaForCausalLM
    from decoders.sdsat import SDSATDecoderGreedy

    torch.set_num_threads(1)
    lm = LlamaForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
    shared = {
        "tokenizer": SimpleNamespace(
            pad_token_id=-1, eos_token_id=-1, model_max_length=2**20
        ),
        "model": Wrapper(lm.to(device)),
        "gen_config": {"top_p": 0.95},
        "device": device,
    }
    plain = ARDecoder(**shared)
    drafting = SDSATDecoderGreedy(**shared, sats=",".join([adaptive] * MAX_K))
    plain.initialize()
    drafting.initialize()
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for line in sys.stdin:
        request = json.loads(line)
        k, new = request["k"], request["new"]
        ids = torch.tensor([request["ids"]], device=device)
        # The published decoder emits one token more than requested.
        plain.generation_config["max_new_tokens"] = new - 1
        began = clock()
        result = drafting.decode(ids, None, k, new) if k else plain.decode(ids, None, 0)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = clock() - began
        tokens = result[0][0].tolist()
        answer = {"tokens": tokens, "seconds": seconds, "forwards": int(result[1])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
