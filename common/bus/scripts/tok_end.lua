-- TOK_END: the tokenizer ends a request itself: an input error, or the answer of /tokenize and /detokenize.
-- KEYS in, req, out, inflight, bytes, cancel, pause, dead
-- ARGV group, entry, uid, ttl_ms, how, dead_reason, worker, field, value, ... (of the terminal entry)
-- Returns 'OK' | 'DUP' | 'ENDED', as TOK_DONE does. Idempotent.
--@include clock
--@include check
--@include place
--@include end
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1) == 0 then return 'DUP' end
local req = redis.call('HMGET', KEYS[2], 'state', 'terminal')
check('XLEN', KEYS[3], KEYS[8])
check('ZCARD', KEYS[4])
check('HLEN', KEYS[5])
check('SCARD', KEYS[6], KEYS[7])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if not req[1] or req[2] then return 'ENDED' end
if req[1] ~= 'queued' then return 'DUP' end
if ARGV[6] ~= '' then
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', 1000, '*',
    'uid', ARGV[3], 'reason', ARGV[6], 'worker', ARGV[7])
end
end_reply(KEYS[2], KEYS[3], ARGV[4], now_ms(), ARGV[5], {unpack(ARGV, 8)})
free_place(ARGV[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
return 'OK'
