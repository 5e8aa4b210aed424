-- check(command, key, ...): reads every key, so that one of a wrong type aborts the script before it writes (B2).
local function check(command, ...)
  for _, key in ipairs({...}) do redis.call(command, key) end
end
