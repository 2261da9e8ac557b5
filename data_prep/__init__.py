"""Raw source files in, packed token shards out. Knows no torch and no model."""
