"""`parlay engine`: an OpenAI-compatible server over the engine; read `app.py` first."""
