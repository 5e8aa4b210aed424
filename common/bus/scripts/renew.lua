-- RENEW: a worker's sign of life on one partition.
-- KEYS lease   ARGV worker, ttl_ms, open ('1' once, at start-up)
-- Returns the server's clock | error FENCED (marked dead, or gone: flushed)
--@include clock
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or (not lease[2] and ARGV[3] ~= '1') then
  return redis.error_reply('FENCED lease is dead or gone')
end
local now = now_ms()
if not lease[2] then redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'seq', 0) end
redis.call('HSET', KEYS[1], 'expiry', now + ARGV[2])
return now
