"""Send a prompt to the server of examples/serve.sh and stream the answer.

python examples/call.py MODEL "def fib(n):" [http://localhost:8000/v1]
"""

import sys

from openai import APIConnectionError, OpenAI


def main(model: str, prompt: str, url: str = "http://localhost:8000/v1") -> None:
    """Print a streamed completion; `model` is the name that serve.sh was started with."""
    client = OpenAI(base_url=url, api_key="none")
    chunks = client.completions.create(
        model=model, prompt=prompt, max_tokens=24, temperature=0, stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except APIConnectionError as error:
        sys.exit(
            f"error: {error.request.url} does not answer: start bash examples/serve.sh MODEL first"
        )
