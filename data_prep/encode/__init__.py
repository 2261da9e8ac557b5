"""Text to ids, never to a control id, and CodeLlama's infilling layouts. Knows no files."""
