"""A model directory in, tokens and reports out. Knows nothing of training but the exported files."""
