"""The inference engine: continuous batching, paged KV, prefix cache, chunked prefill. Knows no Redis and no HTTP."""
