"""The engine: one step loop over a torch or a virtual backend."""
