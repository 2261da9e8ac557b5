"""DeepSpeed's engine and what is kept of it: weights over ranks, checkpoints, random states. Knows no
objective and no data.
"""
