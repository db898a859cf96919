-- The registry's function. Its tag is `{quire}`, and no pool has that name.
--
-- next_arrival  last           -> 1 more than the server's clock in ms, or than the last arrival if
--                                 that is later. `last`: the last one that the caller knows.

-- The clock of a server that has lost the key is later than every arrival, but for a part of a
-- millisecond; hence 1 more than the clock.
define('next_arrival', WRITES, { NUMBER }, function(tag, args)
  local key = tag .. ':arrivals'
  local last = math.max(redis.call('ZSCORE', key, 'arrivals') or 0, args[1])
  local arrival = math.max(now_ms(), last) + 1
  redis.call('ZADD', key, string.format('%d', arrival), 'arrivals')
  return arrival
end)
