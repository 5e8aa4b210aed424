-- RETIRE: marks a worker dead on one partition, at once: its supervisor reaped it, or it drained by itself.
-- KEYS lease, detok lease   ARGV worker, drained ('1'), keep_ms
-- Returns 1. Idempotent. What it still writes is refused (dead=1); its detokenizer partition is free to take.
local exists = redis.call('HLEN', KEYS[1]) > 0
local owns = redis.call('HGET', KEYS[2], 'owner') == ARGV[1]
if exists then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])  -- first: see RENEW
  redis.call('HSET', KEYS[1], 'dead', 1)
  if ARGV[2] == '1' then redis.call('HSET', KEYS[1], 'drained', 1) end
end
if owns then
  redis.call('PERSIST', KEYS[2])
  redis.call('HSET', KEYS[2], 'expiry', 0)
end
return 1
