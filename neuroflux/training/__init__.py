"""Doing it: block training, activation cache, exits, checkpoints, and the pipeline that runs them in order."""
