"""An export's custom_generate/: our loop behind Transformers' `generate`, with that library alone."""
