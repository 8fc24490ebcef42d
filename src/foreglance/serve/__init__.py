"""The server: HTTP to requests, events to answers, one thread that owns the engine.

A border of the project. `openai`, `chat`, `completions` and `responses` are pure and know the wire format; `worker`
owns the engine's thread and knows no wire format; `app` puts routes around both. No tensors, and no rule about tokens.
"""
