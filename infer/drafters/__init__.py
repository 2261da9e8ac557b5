"""Drafters: each hangs a tree under the last emitted token, and learns what came of it."""
