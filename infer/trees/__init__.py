"""Drafts as data: trees, the graphs they are unrolled from, how graphs grow, and their rows and masks.
Pure; knows no model.
"""
