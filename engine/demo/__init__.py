"""The demo: a mixed workload decoded under every mode, and what came of it."""
