"""Token shards in, checkpoints and exported models out."""
