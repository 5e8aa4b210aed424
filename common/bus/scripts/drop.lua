-- DROP: removes a work entry whose request has ended or is gone; frees the place if this was the last of it.
-- Its token log lives as long as the request, which was to live much longer when the log was made.
-- KEYS stream, req, inflight, bytes, cancel, pause, gen   ARGV group, entry, uid, choice
-- Returns 1 when the entry was removed now, else 0.
-- Idempotent: only who still finds the entry pending ends the work on the choice.
--@include check
--@include place
local req = redis.call('HMGET', KEYS[2], 'choices', 'terminal')
check('ZCARD', KEYS[3])
check('HLEN', KEYS[4])
check('SCARD', KEYS[5], KEYS[6])
check('STRLEN', KEYS[7])
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('SREM', KEYS[5], ARGV[3] .. '/' .. ARGV[4])
local life = redis.call('PTTL', KEYS[2])
if life > 0 then redis.call('PEXPIRE', KEYS[7], life, 'LT') else redis.call('DEL', KEYS[7]) end
if not req[1] then
  free_place(ARGV[3], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
elseif redis.call('HSETNX', KEYS[2], 'ended:' .. ARGV[4], 1) == 1 then
  local work = redis.call('HINCRBY', KEYS[2], 'work', 1)
  if req[2] and work >= tonumber(req[1]) then
    free_place(ARGV[3], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
  end
end
return 1
