"""Times ways to load batches with a training step: candidates take turns, and one table has a row for each."""
