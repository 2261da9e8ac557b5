"""Drafts as data: trees, token graphs, their growth, their rows and masks. Pure."""
