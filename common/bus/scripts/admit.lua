-- ADMIT: the request enters Redis and the tokenizers' queue, within the bounds.
-- KEYS req, inflight, in, sched, bytes [, idem, req of the stale holder]
-- ARGV uid, max_queued, max_bytes, size, timeout_ms, queue_timeout_ms, ttl_ms, group, resume_ms, idem_ttl_ms,
--      stale, rows, field, value, ...
--      max_queued counts what no worker has taken yet: `in` entries and undelivered `sched` entries. What the
--      free ones of so many rows will take at once does not count: it hardly waits.
--      resume_ms > 0: the request survives for that long without a reader.
--      stale is the uid of a holder of the idem key whose req the caller found gone; '' for none.
-- Returns {'OK', waiting} | {'DUP', uid that holds the key} | {'FULL', waiting}
-- Idempotent: an existing req (the client retried) or idem key answers DUP and changes nothing. DUP with the
-- caller's own uid is the answer to a repeat; another uid is somebody else's request.
-- A uid whose req was lost may be admitted again; what it still holds in `bytes` is not counted twice.
--@include clock
--@include check
if redis.call('EXISTS', KEYS[1]) == 1 then return {'DUP', ARGV[1]} end
if KEYS[6] then
  local holder = redis.call('GET', KEYS[6])
  local free = not holder or holder == ARGV[1]
    or (holder == ARGV[11] and redis.call('EXISTS', KEYS[7]) == 0)
  if not free then return {'DUP', holder} end
end
local pending = redis.pcall('XPENDING', KEYS[4], ARGV[8])
local running = pending.err and 0 or pending[1]
local waiting = redis.call('XLEN', KEYS[3]) + redis.call('XLEN', KEYS[4]) - running
if waiting >= ARGV[2] + math.max(0, ARGV[12] - running) then return {'FULL', waiting} end
local total = tonumber(redis.call('HGET', KEYS[5], 'total') or 0)
if total > 0 and total + ARGV[4] > tonumber(ARGV[3]) then return {'FULL', waiting} end
check('ZCARD', KEYS[2])
local stale = tonumber(redis.call('HGET', KEYS[5], ARGV[1]) or 0)
local now = now_ms()
local deadline = now + ARGV[5]
redis.call('HSET', KEYS[1], 'state', 'queued', 'created', now, 'deadline', deadline,
  'queue_deadline', math.min(now + ARGV[6], deadline), unpack(ARGV, 13))
if tonumber(ARGV[9]) > 0 then redis.call('HSET', KEYS[1], 'attached_until', now + ARGV[9]) end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('HSET', KEYS[5], ARGV[1], ARGV[4])
redis.call('HINCRBY', KEYS[5], 'total', ARGV[4] - stale)
redis.call('ZADD', KEYS[2], math.min(now + ARGV[6], deadline), ARGV[1])
if KEYS[6] then redis.call('SET', KEYS[6], ARGV[1], 'PX', ARGV[10]) end
redis.call('XADD', KEYS[3], '*', 'uid', ARGV[1])
return {'OK', waiting}
