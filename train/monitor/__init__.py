"""What is seen of a run while it runs, and what may end it: metrics, logs, signals, silent ranks. Trains
nothing.
"""
