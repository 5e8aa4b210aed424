-- TOK_DONE: hand-off from tokenizer to scheduler. The first finisher wins, gated by the pending entry.
-- KEYS in, req, out, sched, gen_0 ... gen_{choices-1}
-- ARGV group, entry, uid, ttl_ms, prompt_tokens, ids, echo ('' for nothing to echo)
-- Returns 'OK' | 'DUP' (someone else handed it off) | 'ENDED' (its reply has ended, or it is gone)
--@include check
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1) == 0 then return 'DUP' end
local req = redis.call('HMGET', KEYS[2], 'state', 'terminal')
check('XLEN', KEYS[3], KEYS[4])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if not req[1] or req[2] then return 'ENDED' end
if req[1] ~= 'queued' then return 'DUP' end
local choices = #KEYS - 4
redis.call('HSET', KEYS[2], 'state', 'waiting', 'ids', ARGV[6], 'choices', choices, 'prompt_tokens', ARGV[5])
redis.call('HDEL', KEYS[2], 'payload')
for choice = 0, choices - 1 do
  redis.call('SET', KEYS[5 + choice], '', 'PX', ARGV[4])
  redis.call('XADD', KEYS[4], '*', 'uid', ARGV[3], 'choice', choice)
end
if ARGV[7] == '' then
  redis.call('XADD', KEYS[3], '*', 'accepted', ARGV[5])
else
  redis.call('XADD', KEYS[3], '*', 'accepted', ARGV[5], 'echo', ARGV[7])
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return 'OK'
