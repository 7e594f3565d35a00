"""What limits a training loop, measured on its own loader and step, and what other loaders would give."""
