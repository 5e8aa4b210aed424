-- free_place(uid, inflight, bytes, cancel, pause): the request leaves the queue's bounds and flag sets.
-- Called once its reply and all its work have ended, or when its reply ended before anybody owned it.
local function free_place(uid, inflight, bytes, cancel, pause)
  redis.call('ZREM', inflight, uid)
  local size = redis.call('HGET', bytes, uid)
  if size then
    redis.call('HDEL', bytes, uid)
    redis.call('HINCRBY', bytes, 'total', -tonumber(size))
  end
  redis.call('SREM', cancel, uid)
  redis.call('SREM', pause, uid)
end
