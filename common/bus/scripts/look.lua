-- LOOK: what a detokenizer needs of a choice that it begins with. It only reads.
-- KEYS req
-- ARGV choice, field names of req ...
-- Returns {ids of this choice's prompt, value, ...} (a value per field name)
--@include prompt
return {prompt_of(KEYS[1], ARGV[1]), unpack(redis.call('HMGET', KEYS[1], unpack(ARGV, 2)))}
