"""The HTTP room: OpenAI-style requests in, requests into Redis, replies out of Redis. Knows no model."""
