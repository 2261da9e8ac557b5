"""Untrusted programs, confined and judged."""
