"""Decoders on prompts, timed, and such work divided over processes; for speed, quality and study."""
