"""Settings of training runs for tests and benchmarks."""

CAUSAL = [
    "model=tiny",
    "objective=causal",
    "deepspeed=zero1",
    "optimizer.lr=2e-3",
    "optimizer.min_lr=5e-5",
]
BRANCH = [
    "objective=branch",
    "deepspeed=zero1",
    "model.attention=eager",
    "objective.L=5",
    "objective.w=2.0",
    "objective.masked_mean=masked",
    "objective.soft=0.5",
    "objective.start_rate=0.2",
    "optimizer.lr=1.5e-3",
    "optimizer.min_lr=5e-5",
]
FINE_TUNE = ["model=pretrained", *BRANCH]
