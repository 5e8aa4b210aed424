-- SETTLE: what a charged request has really used takes the place of what it was charged.
-- KEYS rate, charge
-- ARGV requests (1, or 0 for one that never came to be), tokens
-- Returns 1, or 0 when there was nothing to settle.
-- Idempotent: a settled charge says so, and is not settled again; one that is forgotten stands as it was.
-- It says so for a minute, which is longer than anybody repeats a call without an answer.
--@include clock
--@include bucket
local state, held = bucket(KEYS[1]), redis.call('GET', KEYS[2])
if not held or held == 'settled' or not state.at then return 0 end
local now = now_ms()
local requests, tokens = 0, 0
if state.requests_per_minute > 0 then requests = level(state, 'requests', now) - 1 + ARGV[1] end
if state.tokens_per_minute > 0 then tokens = level(state, 'tokens', now) - held + ARGV[2] end
local ttl = redis.call('PTTL', KEYS[2])
write_bucket(KEYS[1], state, now, requests, tokens, ttl)
redis.call('SET', KEYS[2], 'settled', 'PX', math.min(ttl, 60000))
return 1
