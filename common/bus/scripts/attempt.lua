-- ATTEMPT: counts a try of a tokenizer job that was claimed from a dead worker (B8).
-- KEYS req   ARGV worker
-- Returns the number of tries so far, this one included; 0 when the request is gone or has ended.
-- Idempotent: the same worker counts once.
local req = redis.call('HMGET', KEYS[1], 'state', 'terminal', 'tokenizer', 'tok_attempts')
if not req[1] or req[2] then return 0 end
if req[3] == ARGV[1] then return tonumber(req[4]) end
local attempts = tonumber(req[4] or 1) + 1
redis.call('HSET', KEYS[1], 'tokenizer', ARGV[1], 'tok_attempts', attempts)
return attempts
