"""The custom_generate/ of an export: this project's decoding loop for Transformers' `generate`."""
