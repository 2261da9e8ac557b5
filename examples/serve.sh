#!/usr/bin/env bash
# Serve an export with OpenAI's API, using the decoder in its folder: bash examples/serve.sh MODEL [--port 8000]
# --trust-remote-code runs the code in MODEL/custom_generate/: read it first if the folder is not your own.
set -euo pipefail
exec transformers serve "${1:?MODEL must be the folder of an export}" --trust-remote-code --dtype float32 "${@:2}"
