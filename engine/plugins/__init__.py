"""Plugins that let other engines speculate as parlay decides, and the adapter they share."""
