-- The registry: one function, so that an arrival takes one exchange. Its tag is `{quire}`.
--
--   T:arrivals  ZSET  "arrivals" -> the last arrival

-- Returns the server's clock in milliseconds, or the last arrival + 1 if that is later. `args`: the
-- last arrival that the caller knows, in case the server has lost the key.
define('next_arrival', WRITES, { NUMBER }, function(tag, args)
  local stored = redis.call('ZSCORE', tag .. ':arrivals', 'arrivals')
  local arrival = math.max(now_ms(), tonumber(stored or 0) + 1, tonumber(args[1]) + 1)
  redis.call('ZADD', tag .. ':arrivals', string.format('%d', arrival), 'arrivals')
  return arrival
end)
