-- prompt_of(req, choice): token ids of the prompt of this choice. Of many prompts only the one is sent: else a
-- request of a thousand would be sent whole a thousand times.
local function prompt_of(req, choice)
  local ids, samples = unpack(redis.call('HMGET', req, 'ids', 'n'))
  if not ids then return '' end
  local from = 1
  for _ = 1, math.floor(choice / (samples or 1)) do from = (string.find(ids, ';', from, true) or #ids) + 1 end
  return string.sub(ids, from, (string.find(ids, ';', from, true) or 0) - 1)
end
