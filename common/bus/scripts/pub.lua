-- PUB: the detokenizer's commit: text into the reply streams and its new offset, together.
-- KEYS detok lease, tok, cancel, pause, then out per delta,
--      then (out, req, inflight, bytes) and its gens per finish
-- ARGV epoch, group, expected offset, new offset, entries read, ttl_ms, deltas, finishes, more,
--      then ('choice n at', text) per delta,
--      then (uid, gens, choice, n, at, text, finish, stop, halt, error, message, param) per finish,
--      then (place, name, value) per further field of an entry; deltas are counted from 1, finishes go on
--      finish '' with an error ends the whole request, unless this choice has finished before;
--      halt '1' asks the engine to stop this choice.
-- Returns 'OK' | {'MOVED', stored offset} when the expected offset is not the stored one | error FENCED
-- Idempotent: the offset moves with the text, so a repeat finds another offset and writes nothing (B6).
--@include clock
--@include check
--@include place
--@include end
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED a newer epoch owns the partition')
end
local stored, read
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[2])) do
  local info = {}
  for i = 1, #group, 2 do info[group[i]] = group[i + 1] end
  if info['name'] == ARGV[2] then stored, read = info['last-delivered-id'], info['entries-read'] end
end
if not stored then return redis.error_reply('NOGROUP No such consumer group') end
if stored ~= ARGV[3] then return {'MOVED', stored} end
local deltas, finishes, ttl = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[6]
local more, none = {}, {}
if finishes > 0 then check('SCARD', KEYS[3], KEYS[4]) end
local k, a = 4 + deltas, 9 + 2 * deltas
for _ = 1, finishes do
  check('XLEN', KEYS[k + 1])
  check('HLEN', KEYS[k + 2], KEYS[k + 4])
  check('ZCARD', KEYS[k + 3])
  k, a = k + 4 + ARGV[a + 2], a + 12
end
for _ = 1, tonumber(ARGV[9]) do
  local place = tonumber(ARGV[a + 1])
  local fields = more[place] or {}
  fields[#fields + 1], fields[#fields + 2] = ARGV[a + 2], ARGV[a + 3]
  more[place], a = fields, a + 3
end
redis.call('XGROUP', 'SETID', KEYS[2], ARGV[2], ARGV[4], 'ENTRIESREAD', (read or 0) + ARGV[5])
k, a = 4 + deltas, 9
for i = 1, deltas do
  -- pcall: a reply that somebody broke loses its own text, and does not hold up the others.
  redis.pcall('XADD', KEYS[4 + i], 'NOMKSTREAM', '*', 'at', ARGV[a + 1], 'text', ARGV[a + 2],
    unpack(more[i] or none))
  a = a + 2
end
for i = deltas + 1, deltas + finishes do
  local out, req = KEYS[k + 1], KEYS[k + 2]
  local uid, gens, choice, n = ARGV[a + 1], tonumber(ARGV[a + 2]), ARGV[a + 3], ARGV[a + 4]
  local finish, err = ARGV[a + 7], ARGV[a + 10]
  local state = redis.call('HMGET', req, 'choices', 'terminal', 'work', 'finish:' .. choice)
  if state[1] and not state[2] and not state[4] and redis.call('EXISTS', out) == 1 then
    local fields = {'at', choice .. ' ' .. n .. ' ' .. ARGV[a + 5], 'text', ARGV[a + 6]}
    local done = 0
    if finish ~= '' then
      redis.call('HSET', req, 'finish:' .. choice, finish)
      done = redis.call('HINCRBY', req, 'done', 1)
      redis.call('HINCRBY', req, 'completion_tokens', n)
      fields[5], fields[6], fields[7], fields[8] = 'finish', finish, 'stop', ARGV[a + 8]
      for _, word in ipairs(more[i] or none) do fields[#fields + 1] = word end
      if ARGV[a + 9] == '1' and redis.call('HEXISTS', req, 'ended:' .. choice) == 0 then
        redis.call('SADD', KEYS[3], uid .. '/' .. choice)
      end
    else
      fields = {'error', err, 'message', ARGV[a + 11], 'param', ARGV[a + 12]}
    end
    if err == '' and done < tonumber(state[1]) then
      redis.call('XADD', out, '*', unpack(fields))
    else
      end_reply(req, out, ttl, now_ms(), err == '' and 'done' or 'error', fields)
      for g = 1, gens do redis.call('PEXPIRE', KEYS[k + 4 + g], ttl) end
      if tonumber(state[3] or 0) >= tonumber(state[1]) then
        free_place(uid, KEYS[k + 3], KEYS[k + 4], KEYS[3], KEYS[4])
      elseif err ~= '' then
        redis.call('SADD', KEYS[3], uid)
      end
    end
  end
  k, a = k + 4 + gens, a + 12
end
local ms, low = string.match(ARGV[4], '^(%d+)-(%d+)$')
redis.call('XTRIM', KEYS[2], 'MINID', ms .. '-' .. string.format('%d', low + 1))
return 'OK'
