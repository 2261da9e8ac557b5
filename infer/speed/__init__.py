"""Speed that can be believed: decoders side by side, peers, the physical limit, where the time goes."""
