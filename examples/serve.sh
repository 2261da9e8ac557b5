#!/usr/bin/env bash
# Serves an export over OpenAI's API with the decoder in its folder: bash examples/serve.sh MODEL [--port 8000]
# --trust-remote-code runs MODEL/custom_generate/: read it first in a folder that is not yours.
set -euo pipefail
exec transformers serve "$1" --trust-remote-code --dtype float32 "${@:2}"
