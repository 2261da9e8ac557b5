"""Inputs that nobody would write, by the thousand: no traceback, no hang, no wrong silent result.

    python -m tests.drills.fuzz [--domain settings,rows] [--count 3000] [--seed 0] [--only 17] [--folder DIR]

A domain is a module of this package with

- `COUNT`, the inputs of the whole drill, and
- `run(rng, folder) -> str`, which makes ONE input from `rng`, in the empty `folder`, tries it and returns the
  class of what came of it ("fine", "refused", or a word of its own). It raises AssertionError with what was
  wrong: a silent result that its oracle denies, or what a user would see as a traceback. Any other exception
  that leaves it counts as such a traceback too.

What a domain needs once (a small prepared folder, a tiny model) is a function under `functools.cache`, made in
a place of its own and never written to.
"""
