"""`parlay gpu-check`: whether the engine is right and fast on this GPU, in one command."""
