"""The OpenAI-compatible HTTP API. Talks to an `EngineClient` and a tokenizer; knows no sockets of the engines."""
