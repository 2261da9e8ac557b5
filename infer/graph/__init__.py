"""One draft as a graph, on the terminal and as a picture: python -m infer.graph."""
