"""Proposers: who guesses the next tokens."""
