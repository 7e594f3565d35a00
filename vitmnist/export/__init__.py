"""Exports the model of a run as a file that other programs can load, with a model card next to it."""
