"""What to speculate: policies over plain arrays, numpy only."""

DEFAULT_POLICY = "pilot"
"""What decides where nobody says."""
