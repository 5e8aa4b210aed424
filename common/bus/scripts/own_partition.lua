-- OWN_PARTITION: a detokenizer renews, takes or releases the lease of a partition.
-- KEYS detok lease, my lease   ARGV worker, ttl_ms, mode ('keep', 'take' it if it is free, or 'release')
-- Returns {epoch, 1 if newly taken else 0} | {0, 0} (not mine) | error FENCED
-- Expiry alone never fences the owner: it may renew late as long as nobody has taken the partition.
--@include clock
local me = redis.call('HMGET', KEYS[2], 'dead', 'seq', 'expiry')
if me[1] == '1' or not me[2] then return redis.error_reply('FENCED lease is dead or gone') end
local lease = redis.call('HMGET', KEYS[1], 'owner', 'expiry', 'epoch')
local now = now_ms()
if lease[1] == ARGV[1] then
  redis.call('PERSIST', KEYS[1])  -- first: a full Redis allows it, and after it the rest
  if ARGV[3] == 'release' then
    redis.call('HSET', KEYS[1], 'owner', '', 'expiry', 0)
    return {0, 0}
  end
  redis.call('HSET', KEYS[1], 'expiry', now + ARGV[2])
  return {tonumber(lease[3]), 0}
end
local expiry = tonumber(lease[2] or 0)
if ARGV[3] ~= 'take' or expiry > now then return {0, 0} end
-- It merely expired: who has not renewed its own lease either is no judge of that.
if expiry > 0 and tonumber(me[3]) <= now then return {0, 0} end
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'expiry', now + ARGV[2])
return {epoch, 1}
