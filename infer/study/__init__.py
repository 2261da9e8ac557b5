"""What the GSD paper measures of its drafts, on models and prompts at hand."""
