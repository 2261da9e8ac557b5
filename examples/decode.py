"""Continue a prompt and count the tokens per forward.

python -m examples.decode smollm2 "def fib(n):"
"""

import sys

from conf.errors import UserError
from infer import DecodeConfig, generate, load


def main(name: str, prompt: str) -> None:
    """Stream the text, then print the number of tokens and forwards."""
    model = load(name, "float32")  # a model directory, a hub name, or smollm2
    tokens = forwards = 0
    for step in generate(model, prompt, DecodeConfig(max_new_tokens=64)):
        print(step.text, end="", flush=True)
        tokens += len(step.tokens)
        forwards += 1
    print(f"\n{tokens} tokens in {forwards} forwards")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
