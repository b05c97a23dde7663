"""Bandits over a few fixed ways to speculate."""
