-- EMIT: one engine step of one partition: token logs grow, one `tok` entry, ended choices are acked.
-- KEYS lease, tok, cancel, pause, dead, then gen per row, then req per cached note,
--      then (req, sched, inflight, bytes) per ended choice
-- ARGV seq, group, records, rows, notes, ended, worker, then piece per row ("15043,"), then cached tokens per
--      note, then (uid, choice, entry, dead_reason) per ended choice
-- Returns {'OK', backlog, cancel members, pause members, lost rows} | {'BEHIND', stored seq} | error FENCED
-- Idempotent: applied only when seq = stored + 1; a lower seq (or 0, the tick) changes nothing and gets the
-- same reply. A row is lost when its log is gone (expired, flushed): its piece is taken back.
--@include place
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or not lease[2] then return redis.error_reply('FENCED lease is dead or gone') end
local seq, stored = tonumber(ARGV[1]), tonumber(lease[2])
if seq > stored + 1 then return {'BEHIND', stored} end
local lost = {}
if seq == stored + 1 then
  local rows, notes, ended = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
  redis.call('HSET', KEYS[1], 'seq', ARGV[1])
  if ARGV[3] ~= '' then redis.call('XADD', KEYS[2], '*', 'v', '1', 'r', ARGV[3]) end
  for i = 1, rows do
    local key, piece = KEYS[5 + i], ARGV[7 + i]
    if redis.call('APPEND', key, piece) == #piece and redis.call('PTTL', key) < 0 then
      redis.call('DEL', key)
      lost[#lost + 1] = i - 1
    end
  end
  for i = 1, notes do
    local req = KEYS[5 + rows + i]
    if redis.call('EXISTS', req) == 1 then
      redis.call('HINCRBY', req, 'cached_tokens', ARGV[7 + rows + i])
    end
  end
  for i = 1, ended do
    local k, a = 5 + rows + notes + 4 * (i - 1), 7 + rows + notes + 4 * (i - 1)
    local req, uid, choice, reason = KEYS[k + 1], ARGV[a + 1], ARGV[a + 2], ARGV[a + 4]
    redis.call('XACK', KEYS[k + 2], ARGV[2], ARGV[a + 3])
    redis.call('XDEL', KEYS[k + 2], ARGV[a + 3])
    redis.call('SREM', KEYS[3], uid .. '/' .. choice)
    if reason ~= '' then
      redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'uid', uid, 'choice', choice,
        'reason', reason, 'worker', ARGV[7])
    end
    local state = redis.call('HMGET', req, 'choices', 'terminal')
    if not state[1] then
      free_place(uid, KEYS[k + 3], KEYS[k + 4], KEYS[3], KEYS[4])
    elseif redis.call('HSETNX', req, 'ended:' .. choice, 1) == 1 then
      local work = redis.call('HINCRBY', req, 'work', 1)
      if state[2] and work >= tonumber(state[1]) then
        free_place(uid, KEYS[k + 3], KEYS[k + 4], KEYS[3], KEYS[4])
      end
    end
  end
end
return {'OK', redis.call('XLEN', KEYS[2]), redis.call('SMEMBERS', KEYS[3]),
  redis.call('SMEMBERS', KEYS[4]), lost}
