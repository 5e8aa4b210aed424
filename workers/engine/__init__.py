"""The inference engine: continuous batching, paged KV, prefix cache. Knows no Redis and no HTTP."""
