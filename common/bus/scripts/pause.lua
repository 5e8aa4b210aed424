-- PAUSE: an API process whose client does not keep up asks the scheduler to pause the request, or to go on.
-- KEYS req, pause   ARGV uid, on ('1' or '0')
-- Returns 1 when the flag is set now, else 0. Idempotent. What has ended is not flagged any more.
local state = redis.call('HMGET', KEYS[1], 'state', 'terminal')
if ARGV[2] ~= '1' or not state[1] or state[2] then
  redis.call('SREM', KEYS[2], ARGV[1])
  return 0
end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
