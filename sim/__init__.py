"""The simulator: the engine's step loop on a virtual clock, with measured costs."""
