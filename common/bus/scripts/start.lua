-- START: a scheduler takes one choice: checks that it is still wanted, records the owner, counts attempts.
-- KEYS lease, req, gen, inflight, cancel
-- ARGV uid, choice, worker, counts ('1': the last owner crashed; '0': fresh, or handed over by a drain),
--      field names of req ...
-- Returns {'OK', attempts, gen, ids of this choice's prompt, value, ...} (a value per field name)
--       | {'CANCELLED', gen} | {'ENDED'} | error FENCED
-- Idempotent: the same worker asking again changes nothing. A crash counts only when the log has not grown
-- since the last claim (B8).
--@include clock
--@include check
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or not lease[2] then return redis.error_reply('FENCED lease is dead or gone') end
local choice = ARGV[2]
local req = redis.call('HMGET', KEYS[2], 'state', 'terminal', 'deadline', 'ended:' .. choice,
  'owner:' .. choice, 'progress:' .. choice, 'attempts:' .. choice)
local gen = redis.call('GET', KEYS[3])
if not req[1] or not gen or req[2] or req[4] then return {'ENDED'} end
local cancelled = redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1
  or redis.call('SISMEMBER', KEYS[5], ARGV[1] .. '/' .. choice) == 1
local attempts = tonumber(req[7] or 0)
if req[5] ~= ARGV[3] then
  check('ZCARD', KEYS[4])
  if req[5] and ARGV[4] == '1' then
    if tonumber(req[6]) == #gen then attempts = attempts + 1 else attempts = 0 end
  end
  redis.call('HSET', KEYS[2], 'state', 'running', 'owner:' .. choice, ARGV[3],
    'progress:' .. choice, #gen, 'attempts:' .. choice, attempts)
  redis.call('HSETNX', KEYS[2], 'started', now_ms())
  redis.call('ZADD', KEYS[4], 'XX', req[3], ARGV[1])
end
if cancelled then return {'CANCELLED', gen} end
-- Of many prompts only the one is sent: else a request of a thousand would be sent whole a thousand times.
local ids, samples = unpack(redis.call('HMGET', KEYS[2], 'ids', 'n'))
local from = 1
for _ = 1, math.floor(choice / samples) do from = string.find(ids, ';', from, true) + 1 end
local prompt = string.sub(ids, from, (string.find(ids, ';', from, true) or 0) - 1)
return {'OK', attempts, gen, prompt, unpack(redis.call('HMGET', KEYS[2], unpack(ARGV, 5)))}
