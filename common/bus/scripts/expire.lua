-- EXPIRE: the sweep of one overdue member of `inflight`.
-- KEYS req, out, inflight, bytes, cancel, pause, owner lease
-- ARGV uid, ttl_ms, owner (as the sweeper read it, '' for none), lost_ms
-- Returns 'NONE' | 'LATER' (not due) | 'FLAGGED' (its live owner is asked to stop) | 'ENDED' | 'FREED'
-- Idempotent. An owner is gone when its lease is dead, missing, or expired by lost_ms.
--@include clock
--@include check
--@include place
--@include end
local due = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not due then return 'NONE' end
local now = now_ms()
local req = redis.call('HMGET', KEYS[1], 'state', 'terminal', 'deadline', 'queue_deadline', 'choices', 'work')
local owner = redis.call('HMGET', KEYS[7], 'dead', 'expiry')
check('XLEN', KEYS[2])
check('HLEN', KEYS[4])
check('SCARD', KEYS[5], KEYS[6])
if not req[1] then
  free_place(ARGV[1], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
  return 'FREED'
end
local overdue = req[1] == 'running' and req[3] or req[4]
if req[1] ~= 'ended' and tonumber(overdue) > now then
  redis.call('ZADD', KEYS[3], 'XX', overdue, ARGV[1])
  return 'LATER'
end
local owned = req[1] ~= 'queued' and req[1] ~= 'waiting' and ARGV[3] ~= '' and owner[1] ~= '1'
  and owner[2] and tonumber(owner[2]) + ARGV[4] > now
if owned then
  redis.call('HSETNX', KEYS[1], 'expired', now)
  redis.call('SADD', KEYS[5], ARGV[1])
  redis.call('ZADD', KEYS[3], 'XX', now + 1000, ARGV[1])
  return 'FLAGGED'
end
if not req[2] then
  local queued = req[1] ~= 'running'
  end_reply(KEYS[1], KEYS[2], ARGV[2], now, 'error', {
    'error', queued and 'unavailable' or 'deadline',
    'message', queued and 'The request waited too long in the queue.'
      or 'The request did not finish before its deadline.', 'param', ''})
end
if req[1] ~= 'queued' and req[1] ~= 'waiting' and tonumber(req[6] or 0) < tonumber(req[5]) then
  -- Other choices may still be running elsewhere, and are told to stop; the last of the work frees the rest.
  redis.call('SADD', KEYS[5], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
else
  free_place(ARGV[1], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
end
return 'ENDED'
