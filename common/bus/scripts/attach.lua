-- ATTACH: somebody reads these requests: they are held against being given up, and their keys live on.
-- KEYS for each request: req, then its other keys (out, gens, idem)
-- ARGV ttl_ms, then (hold_ms, number of its keys) for each request
--      hold_ms '' leaves `attached_until` as it is; '0' says that the reader has left.
-- Returns how many of the requests there still are.
-- Idempotent: a repeat moves a time on. A life never gets shorter, and what is gone does not come back.
--@include clock
local now, k, found = now_ms(), 0, 0
for a = 2, #ARGV, 2 do
  local hold, keys = ARGV[a], tonumber(ARGV[a + 1])
  -- pcall: a request that somebody broke does not hold up the others.
  local state = redis.pcall('HGET', KEYS[k + 1], 'state')
  if type(state) == 'string' then
    found = found + 1
    -- PEXPIRE first: a full Redis allows it, and after it the rest.
    for i = 1, keys do redis.call('PEXPIRE', KEYS[k + i], ARGV[1], 'GT') end
    if hold ~= '' and state ~= 'ended' then
      redis.call('HSET', KEYS[k + 1], 'attached_until', now + hold)
    end
  end
  k = k + keys
end
return found
