"""Scoring operations on plain tensors: :mod:`.api` validates and chooses, :mod:`.reference` is the oracle."""
