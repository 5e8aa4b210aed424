-- CANCEL: asks for the end of a request. Unowned it ends here and now; owned it is flagged for its scheduler.
-- KEYS req, out, inflight, bytes, cancel, pause   ARGV uid, ttl_ms, error, message, abandoned
--      abandoned '1': only if nobody holds it any more, that is, `attached_until` has passed or is not set
-- Returns 'NONE' (unknown or ended: nothing to do) | 'HELD' | 'ENDED' (ended here) | 'FLAGGED'
-- Idempotent.
--@include clock
--@include check
--@include place
--@include end
local req = redis.call('HMGET', KEYS[1], 'state', 'terminal', 'attached_until')
if not req[1] or req[2] then return 'NONE' end
if ARGV[5] == '1' and tonumber(req[3] or 0) > now_ms() then return 'HELD' end
check('XLEN', KEYS[2])
check('ZCARD', KEYS[3])
check('HLEN', KEYS[4])
check('SCARD', KEYS[5], KEYS[6])
if req[1] == 'running' then
  redis.call('SADD', KEYS[5], ARGV[1])
  return 'FLAGGED'
end
end_reply(KEYS[1], KEYS[2], ARGV[2], now_ms(), 'error', {'error', ARGV[3], 'message', ARGV[4], 'param', ''})
free_place(ARGV[1], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
return 'ENDED'
