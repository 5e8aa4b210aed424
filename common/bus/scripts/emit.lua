-- EMIT: one engine step of one partition: token logs grow, one `tok` entry, ended choices are acked.
-- KEYS lease, tok, cancel, pause, dead, then gen per row, then req per note,
--      then (req, sched, inflight, bytes) per ended choice
-- ARGV seq, group, worker, rows, notes, ended, records (one per row, joined by '|'), then (piece, at) per row
--      ('15043,', and the length of the log that the writer appends it to), then (choice, cached tokens) per
--      note, then (uid, choice, entry, dead_reason) per ended choice
-- Returns {'OK', backlog, cancel members, pause members, refused rows, stored seq}
--       | {'BEHIND', stored seq} | error FENCED
-- Idempotent: applied only when seq = stored + 1; a lower seq (or 0, the tick) changes nothing.
-- A row whose log is gone (expired, flushed), or not as long as its writer believes (another worker got the
-- choice after Redis rolled back), is refused: its piece is taken back, its record and its end do not count.
--@include check
--@include place
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or not lease[2] then return redis.error_reply('FENCED lease is dead or gone') end
local seq, stored = tonumber(ARGV[1]), tonumber(lease[2])
if seq > stored + 1 then return {'BEHIND', stored} end
local rows, notes, ended = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local refused = {}

local function append(key, piece, at)
  local size = redis.pcall('APPEND', key, piece)
  if size == at + #piece and (at > 0 or redis.call('PTTL', key) > 0) then return true end
  if size == #piece and redis.call('PTTL', key) < 0 then
    redis.call('DEL', key)
  elseif type(size) == 'number' then
    local kept = size - #piece
    redis.call('SET', key, kept > 0 and redis.call('GETRANGE', key, 0, kept - 1) or '', 'KEEPTTL')
  end
  return false
end

-- The records without those of refused rows, and the choices ('uid/choice') that these were of.
local function accepted(records)
  local kept, without, dropped, row = {}, {}, {}, 0
  for _, index in ipairs(refused) do without[index] = true end
  for record in string.gmatch(records, '[^|]+') do
    if without[row] then
      local uid, choice = string.match(record, '^(%S+) (%S+)')
      dropped[uid .. '/' .. choice] = true
    else
      kept[#kept + 1] = record
    end
    row = row + 1
  end
  return table.concat(kept, '|'), dropped
end

local function end_work(k, uid, choice, entry, reason)
  local req = KEYS[k + 1]
  redis.call('XACK', KEYS[k + 2], ARGV[2], entry)
  redis.call('XDEL', KEYS[k + 2], entry)
  redis.call('SREM', KEYS[3], uid .. '/' .. choice)
  if reason ~= '' then
    redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'uid', uid, 'choice', choice,
      'reason', reason, 'worker', ARGV[3])
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

-- Read before anything is written, which also shows that these keys are of the right type.
local backlog = redis.call('XLEN', KEYS[2])
local cancelled, paused = redis.call('SMEMBERS', KEYS[3]), redis.call('SMEMBERS', KEYS[4])
if seq == stored + 1 then
  local first_end = 5 + rows + notes
  for i = 1, notes do check('HLEN', KEYS[5 + rows + i]) end
  if ended > 0 then check('XLEN', KEYS[5]) end
  for i = 0, ended - 1 do
    local k = first_end + 4 * i
    check('HLEN', KEYS[k + 1], KEYS[k + 4])
    check('XLEN', KEYS[k + 2])
    check('ZCARD', KEYS[k + 3])
  end
  redis.call('HSET', KEYS[1], 'seq', ARGV[1])
  local a = 7
  for i = 1, rows do
    if not append(KEYS[5 + i], ARGV[a + 1], tonumber(ARGV[a + 2])) then refused[#refused + 1] = i - 1 end
    a = a + 2
  end
  local records, dropped = ARGV[7], {}
  if #refused > 0 then records, dropped = accepted(records) end
  if records ~= '' then
    redis.call('XADD', KEYS[2], '*', 'v', '1', 'r', records)
    backlog = backlog + 1
  end
  for i = 1, notes do
    -- The samples of one prompt share it: the first one's word counts, once.
    local req, choice, tokens = KEYS[5 + rows + i], ARGV[a + 1], ARGV[a + 2]
    local state, n = unpack(redis.call('HMGET', req, 'state', 'n'))
    if state and choice % (n or 1) == 0
        and redis.call('HSETNX', req, 'cached:' .. choice, tokens) == 1 then
      redis.call('HINCRBY', req, 'cached_tokens', tokens)
    end
    a = a + 2
  end
  for i = 0, ended - 1 do
    local uid, choice = ARGV[a + 1], ARGV[a + 2]
    if not dropped[uid .. '/' .. choice] then
      end_work(first_end + 4 * i, uid, choice, ARGV[a + 3], ARGV[a + 4])
    end
    a = a + 4
  end
end
return {'OK', backlog, cancelled, paused, refused, math.max(seq, stored)}
