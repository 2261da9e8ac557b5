"""A page to try a model on: its own decoding beside plain decoding of the same prompt, both streaming."""
