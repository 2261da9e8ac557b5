"""Drafters: each attaches a tree to the last emitted token and learns from its result."""
