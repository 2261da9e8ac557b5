"""Random and damaged inputs of every kind; see __main__.py."""
