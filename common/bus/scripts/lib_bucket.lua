-- What an API key has used of its limits, as one hash. Reading: bucket(key) -> its fields as numbers.
-- level(state, name, now) -> what is used of the limit `name` at `now`: it drains at the limit per minute.
-- room(state, name, now) -> what is left of it, rounded down, and the milliseconds until all of it is back.
-- write_bucket(key, state, now, requests, tokens, ttl): new levels, kept for ttl milliseconds and as long as
-- they say anything. A limit of 0 is none.
local function bucket(key)
  local flat, state = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do state[flat[i]] = tonumber(flat[i + 1]) end
  return state
end
local function level(state, name, now)
  local limit = state[name .. '_per_minute']
  return math.max(0, (state[name] or 0) - math.max(0, now - (state.at or now)) * limit / 60000)
end
local function room(state, name, now)
  local limit, used = state[name .. '_per_minute'], level(state, name, now)
  if limit == 0 then return 0, 0 end
  return math.floor(math.max(0, limit - used)), math.ceil(used * 60000 / limit)
end
local function write_bucket(key, state, now, requests, tokens, ttl)
  state.at, state.requests, state.tokens = now, math.max(0, requests), math.max(0, tokens)
  redis.call('HSET', key, 'at', now,
    'requests', string.format('%.3f', state.requests), 'requests_per_minute', state.requests_per_minute,
    'tokens', string.format('%.3f', state.tokens), 'tokens_per_minute', state.tokens_per_minute)
  local _, requests_ms = room(state, 'requests', now)
  local _, tokens_ms = room(state, 'tokens', now)
  redis.call('PEXPIRE', key, string.format('%d', ttl + 60000 + math.max(requests_ms, tokens_ms)))
end
