"""The blocks that a decoder is assembled from."""
