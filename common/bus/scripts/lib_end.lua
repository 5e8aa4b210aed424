-- end_reply(req, out, ttl, now, fields): writes the one terminal entry, sets it in req, shortens lives.
-- `fields` holds what the entry carries besides; the caller has checked that req exists without `terminal`.
local function end_reply(req, out, ttl, now, how, fields)
  local counts = redis.call('HMGET', req, 'prompt_tokens', 'completion_tokens', 'cached_tokens')
  fields[#fields + 1] = 'usage'
  fields[#fields + 1] = (counts[1] or '0') .. ' ' .. (counts[2] or '0') .. ' ' .. (counts[3] or '0')
  fields[#fields + 1] = 'end'
  fields[#fields + 1] = how
  redis.call('HSET', req, 'terminal', how, 'state', 'ended', 'ended', now)
  redis.call('XADD', out, '*', unpack(fields))
  redis.call('PEXPIRE', out, ttl)
  redis.call('PEXPIRE', req, ttl)
end
