"""A preparation as phases of tasks, on this machine's cores, Ray or Slurm. Each task writes a folder of its
own.
"""
