-- The registry: one function, so that an arrival takes one exchange. Its tag is `{quire}`.
--
--   T:arrivals  ZSET  "arrivals" -> the last arrival

-- Returns 1 more than the server's clock in milliseconds, or than the last arrival if that is later.
-- So a server that has lost the key gives no number twice: its clock is later than every arrival.
-- `args`: the last arrival that the caller knows.
define('next_arrival', WRITES, { NUMBER }, function(tag, args)
  local key = tag .. ':arrivals'
  local last = math.max(redis.call('ZSCORE', key, 'arrivals') or 0, args[1])
  local arrival = math.max(now_ms(), last) + 1
  redis.call('ZADD', key, string.format('%d', arrival), 'arrivals')
  return arrival
end)
