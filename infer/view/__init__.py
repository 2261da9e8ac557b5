"""Decoded text for people: a terminal as it comes, an HTML page, a line of figures. Chooses and measures
nothing.
"""
