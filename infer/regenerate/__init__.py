"""python -m infer.regenerate: documents of training continued by the model, to train drafts on its own text.

config.py    the settings
source.py    which documents of a finished data folder are continued, and from where
run.py       from the settings to shards of JSON lines: units of documents, each kept as soon as it is done
"""
