"""Evaluation: data set -> index -> retrieve -> measure -> compare -> report."""
