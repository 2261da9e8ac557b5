"""Where things lie in a training folder.

<out>/run.json          what the run is made from, written before its first step
<out>/model/            the architecture and the tokenizer, for an export
<out>/ngrams.safetensors  the n-gram table of the data, where they have one, for an export
<out>/checkpoints/      see train/engine/checkpoints.py
<out>/log.jsonl         a line for every step
<out>/diagnostics.json  of the step that a run stopped at because it had gone wrong
<out>/manifest.json     written last, when the run is finished
"""

RUN = "run.json"
DESCRIBED = "model"
CHECKPOINTS = "checkpoints"
LOG = "log.jsonl"
DIAGNOSTICS = "diagnostics.json"
