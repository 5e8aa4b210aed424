-- CLAIM_DEAD: takes the pending entries of a dead worker. Its lease is marked dead first, so that the zombie
-- is fenced before anybody else runs its work.
-- KEYS stream, my lease, dead lease   ARGV group, me, dead worker, count, expired_ok ('1'), keep_ms
--      expired_ok says that the caller observed the expiry twice (B3); without it only dead=1 counts, and who
--      has not renewed its own lease is no judge of others'.
-- Returns {'OK', drained, left, entry, uid, choice, entry, uid, choice, ...} | {'ALIVE'} | error FENCED
-- Idempotent: a lost reply leaves the entries in the caller's pending list, where it searches (B5).
--@include clock
local now = now_ms()
local me = redis.call('HMGET', KEYS[2], 'dead', 'seq', 'expiry')
if me[1] == '1' or not me[2] then return redis.error_reply('FENCED lease is dead or gone') end
local lease = redis.call('HMGET', KEYS[3], 'dead', 'expiry', 'drained')
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[3])
if lease[1] ~= '1' then
  local expired = tonumber(lease[2] or 0) <= now and tonumber(me[3]) > now
  if ARGV[5] ~= '1' or not expired then return {'ALIVE'} end
  redis.call('HSET', KEYS[3], 'dead', 1)
  redis.call('PEXPIRE', KEYS[3], ARGV[6])
end
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[3])
  return {'OK', lease[3] or '0', 0}
end
local reply = {'OK', lease[3] or '0', #pending}
for i = 1, #pending do
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, pending[i][1])
  if #claimed > 0 and claimed[1][2] then
    local flat, fields = claimed[1][2], {}
    for f = 1, #flat, 2 do fields[flat[f]] = flat[f + 1] end
    if fields['uid'] then  -- else nobody of ours wrote it: the search for stranded entries removes it
      reply[#reply + 1] = claimed[1][1]
      reply[#reply + 1] = fields['uid']
      reply[#reply + 1] = fields['choice'] or '0'
    end
  end
end
return reply
