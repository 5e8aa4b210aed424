-- CHARGE: a request counts against the limits of its API key, if they leave room for it.
-- KEYS rate, charge
-- ARGV requests_per_minute, tokens_per_minute, tokens, ttl_ms
--      A limit of 0 is none. What costs more than a whole minute's passes when nothing is used. The charge is
--      remembered for ttl_ms, and the levels for longer than any charge.
-- Returns {'OK' | 'LIMITED', name of the limit, ms to wait, requests left, ms until all are back,
--          tokens left, ms until all are back}; the name and the wait are '' and 0 with OK.
-- Idempotent: a charge that is remembered answers OK and changes nothing. LIMITED changes nothing.
--@include clock
--@include bucket
local now, state, known = now_ms(), bucket(KEYS[1]), redis.call('GET', KEYS[2])
local function reply(code, name, wait)
  local requests, requests_ms = room(state, 'requests', now)
  local tokens, tokens_ms = room(state, 'tokens', now)
  return {code, name, math.ceil(wait), requests, requests_ms, tokens, tokens_ms}
end
state.requests_per_minute, state.tokens_per_minute = tonumber(ARGV[1]), tonumber(ARGV[2])
if known then return reply('OK', '', 0) end
local costs, after = {requests = 1, tokens = tonumber(ARGV[3])}, {requests = 0, tokens = 0}
local short, wait = '', 0
for _, name in ipairs({'requests', 'tokens'}) do
  local limit, cost = state[name .. '_per_minute'], costs[name]
  if limit > 0 then
    after[name] = level(state, name, now) + cost
    local over = (after[name] - math.max(limit, cost)) * 60000 / limit
    if cost > 0 and over > wait then short, wait = name, over end
  end
end
if short ~= '' then return reply('LIMITED', short, wait) end
write_bucket(KEYS[1], state, now, after.requests, after.tokens, ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return reply('OK', '', 0)
