-- START: a scheduler takes one choice: checks that it is still wanted, records the owner, counts attempts.
-- KEYS lease, req, gen, inflight, cancel, lease of the last owner
-- ARGV uid, choice, worker, last owner (as far as the caller knows; '' for nobody), alone ('1': it is about
--      to run with nothing beside it), field names of req ...
-- Returns {'OK', attempts, gen, ids of this choice's prompt, value, ...} (a value per field name)
--       | {'CANCELLED', gen} | {'ENDED'} | {'OWNER', worker} (the last owner: ask again with its lease)
--       | error FENCED
-- Idempotent: the same worker asking again changes nothing.
-- attempts (B8): crashes of owners that ran it, since its log last grew. Who drained did not crash. With any,
-- the choice is a suspect: it is held back (`progress` is empty, and a crash of this owner does not count)
-- until its owner asks with alone.
--@include clock
--@include check
--@include prompt
local lease = redis.call('HMGET', KEYS[1], 'dead', 'seq')
if lease[1] == '1' or not lease[2] then return redis.error_reply('FENCED lease is dead or gone') end
local choice, me, alone = ARGV[2], ARGV[3], ARGV[5] == '1'
local req = redis.call('HMGET', KEYS[2], 'state', 'terminal', 'deadline', 'ended:' .. choice,
  'owner:' .. choice, 'progress:' .. choice, 'attempts:' .. choice)
local gen = redis.call('GET', KEYS[3])
if not req[1] or not gen or req[2] or req[4] then return {'ENDED'} end
local owner, progress = req[5], tonumber(req[6] or '')
if owner and owner ~= me and owner ~= ARGV[4] then return {'OWNER', owner} end
local cancelled = redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1
  or redis.call('SISMEMBER', KEYS[5], ARGV[1] .. '/' .. choice) == 1
local attempts = tonumber(req[7] or 0)
check('ZCARD', KEYS[4])
if owner and owner ~= me and progress then
  local last = redis.call('HMGET', KEYS[6], 'dead', 'drained', 'seq')
  local crashed = last[2] ~= '1' and (last[1] == '1' or not last[3])
  if progress ~= #gen then attempts = 0 elseif crashed then attempts = attempts + 1 end
end
if owner ~= me or (alone and not progress) then
  redis.call('HSET', KEYS[2], 'state', 'running', 'owner:' .. choice, me, 'attempts:' .. choice, attempts,
    'progress:' .. choice, (attempts == 0 or alone) and #gen or '')
  redis.call('HSETNX', KEYS[2], 'started', now_ms())
  redis.call('ZADD', KEYS[4], 'XX', req[3], ARGV[1])
end
if cancelled then return {'CANCELLED', gen} end
return {'OK', attempts, gen, prompt_of(KEYS[2], choice), unpack(redis.call('HMGET', KEYS[2], unpack(ARGV, 6)))}
