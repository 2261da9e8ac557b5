"""What stands between a program and the machine. Runs in a small process of its own, on the standard library.

`main` reads one job, builds the room (walls), starts the steward in it, who runs the program's steps, and
watches from outside until all is over. Imported as the top-level package `guard`, without the rest of
`infer`, which takes seconds to import: hence relative imports only.
"""
