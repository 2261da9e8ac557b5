"""What runs inside rooms for Python programs: the solution in one, its tests in another, and data between.

Imported as the top-level package `players` on the standard library alone: hence relative imports only.
"""
