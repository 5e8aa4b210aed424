-- RENEW: a worker's sign of life on one partition.
-- KEYS lease   ARGV worker, ttl_ms, open ('1' once, at start-up), keep_ms
-- Returns the server's clock | error FENCED (marked dead, or gone: flushed)
-- A lease that nobody renews or marks dead goes away by itself after keep_ms.
--@include clock
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or (not lease[2] and ARGV[3] ~= '1') then
  return redis.error_reply('FENCED lease is dead or gone')
end
local now = now_ms()
-- PEXPIRE first: a full Redis allows it, and after it the rest. Being out of memory must not look like death.
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if not lease[2] then redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'seq', 0) end
redis.call('HSET', KEYS[1], 'expiry', now + ARGV[2])
if not lease[2] then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return now
