-- Helpers for workers, holders and waiters; no registered functions. 10_keys.lua lists keys and
-- common codes.

local QUARANTINE = 'quarantine:' -- begins the id of a quarantine, before its worker

-- Whether the worker is fenced. UNKNOWN_WORKER.
local function is_fenced(pool, worker)
  local fenced = redis.call('HGET', pool.tag .. ':workers', worker)
  if not fenced then refuse('UNKNOWN_WORKER', 'worker', worker, 'is not on pool', pool.tag) end
  return fenced == '1'
end

-- UNKNOWN_WORKER, FENCED.
local function require_live(pool, worker)
  if is_fenced(pool, worker) then refuse('FENCED', 'worker', worker, 'is fenced') end
end

local function find_holder(pool, id)
  local key = pool.tag .. ':holder:' .. id
  local fields = redis.call('HMGET', key, 'worker', 'epoch', 'order', 'cached')
  if not fields[1] then return nil end
  return {
    id = id,
    worker = fields[1],
    epoch = tonumber(fields[2]),
    order = tonumber(fields[3]),
    num_cached = tonumber(fields[4]),
  }
end

-- STALE_HOLDER: the holder does not exist.
local function holder_of(pool, id)
  local holder = find_holder(pool, id)
  if not holder then refuse('STALE_HOLDER', id, 'holds nothing') end
  return holder
end

-- STALE_HOLDER: the holder is at another epoch.
local function require_epoch(holder, epoch)
  if holder.epoch ~= epoch then
    refuse('STALE_HOLDER', holder.id, 'is at epoch', holder.epoch, 'not', epoch)
  end
end

-- The blocks of acquisitions number `first` to `last`, counted from 0.
local function acquired(pool, id, first, last)
  if last < first then return {} end
  return redis.call('LRANGE', pool.tag .. ':acquired:' .. id, first, last)
end

-- {value ..., block ...}
local function answer(blocks, ...)
  local reply = { ... }
  for _, block in ipairs(blocks) do reply[#reply + 1] = block end
  return reply
end

-- Whether (order, id) comes after (other_order, other_id). Ids are compared byte by byte, since
-- Lua's own comparison of strings depends on the server's locale.
local function is_behind(order, id, other_order, other_id)
  if order ~= other_order then return order > other_order end
  for i = 1, math.min(#id, #other_id) do
    local byte, other_byte = string.byte(id, i), string.byte(other_id, i)
    if byte ~= other_byte then return byte > other_byte end
  end
  return #id > #other_id
end

-- The last holder in order whose worker is not fenced, or nil: compares the last of each worker.
local function last_in_order(pool)
  local last
  local workers = redis.call('HGETALL', pool.tag .. ':workers')
  for i = 1, #workers, 2 do
    local top = {}
    if workers[i + 1] == '0' then
      top = redis.call('ZREVRANGE', pool.tag .. ':holders:' .. workers[i], 0, 0, 'WITHSCORES')
    end
    local id, order = top[1], tonumber(top[2])
    if id and (not last or is_behind(order, id, last.order, last.id)) then
      last = { id = id, order = order }
    end
  end
  return last and find_holder(pool, last.id)
end

-- The holders of a worker that must be preempted, in order.
local function demands_of(pool, worker)
  local own, ids = {}, {}
  for _, id in ipairs(redis.call('SMEMBERS', pool.tag .. ':demands')) do
    local holder = find_holder(pool, id)
    if holder.worker == worker then own[#own + 1] = holder end
  end
  table.sort(own, function(a, b) return is_behind(b.order, b.id, a.order, a.id) end)
  for i, holder in ipairs(own) do ids[i] = holder.id end
  return ids
end

local function start_wait(pool, id, worker, order)
  local before = redis.call('HGET', pool.tag .. ':waiting', id)
  if before then redis.call('SREM', pool.tag .. ':waits:' .. before, id) end
  redis.call('ZADD', pool.tag .. ':waiters', order, id)
  redis.call('HSET', pool.tag .. ':waiting', id, worker)
  redis.call('SADD', pool.tag .. ':waits:' .. worker, id)
end

-- Ends a wait. The next waiter may be served now, so this announces room.
local function end_wait(pool, id)
  local worker = redis.call('HGET', pool.tag .. ':waiting', id)
  if not worker then return end
  redis.call('ZREM', pool.tag .. ':waiters', id)
  redis.call('HDEL', pool.tag .. ':waiting', id)
  redis.call('SREM', pool.tag .. ':waits:' .. worker, id)
  pool.has_news = true
end

local function end_waits_of(pool, worker)
  local ids = redis.call('SMEMBERS', pool.tag .. ':waits:' .. worker)
  if #ids == 0 then return end
  store('ZREM', pool.tag .. ':waiters', ids)
  store('HDEL', pool.tag .. ':waiting', ids)
  redis.call('DEL', pool.tag .. ':waits:' .. worker)
  pool.has_news = true
end
