"""What to speculate: policies over plain arrays, numpy only."""
