"""Settings: Hydra's YAML and overrides become a typed dataclass; the command line of a stage."""
