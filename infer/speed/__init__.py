"""python -m infer.speed: decoders against plain decoding in the same loop, pair by pair."""
