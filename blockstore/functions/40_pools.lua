-- Pools and their workers. 10_keys.lua lists keys and common codes.
--
-- register_pool  model fingerprint num_blocks block_size block_bytes watermark run_id
--                -> the run_id in the header. POOL_EXISTS: it has another spec
-- drop_pool      -> 1 if keys are left: call again; else 0
-- register_worker  worker fingerprint num_blocks block_size block_bytes lease_ms (0: no lease)
--                -> the run_id in the header. Joining again renews the lease
--                UNKNOWN_WORKER: the name was reaped. FENCED. GEOMETRY_MISMATCH.
--                FINGERPRINT_MISMATCH
-- fence          worker -> OK. UNKNOWN_WORKER. A missing worker gets a quarantine
-- leave          worker -> OK, also if it is not on the pool. NOT_EMPTY
-- heartbeat      worker -> [fenced 0|1, demanded holder ...]. UNKNOWN_WORKER. RECOVERING: it is
--                missing
-- reap           worker -> [holders released by this call, 1 if holders are left: call again]
--                LEASED: its lease has not ended

local SPEC = { 'model', 'fingerprint', 'num_blocks', 'block_size', 'block_bytes', 'watermark' }
local OTHER_KEYS = {
  'returned', 'cached', 'refs', 'index', 'hashes', 'workers', 'waiters', 'waiting', 'demands',
  'tombs', 'graves', 'missing', 'leases', 'kept', 'retained', 'charged', 'retentions', 'shares',
  'payers',
}
local DROP_PAGE = 1000 -- holders
local REAP_PAGE = 1024 -- references: a few milliseconds

-- Writes the header of a pool; `spec` begins with the values of SPEC.
local function make_pool(key, epoch, run_id, spec)
  local header = { 'run_id', run_id, 'epoch', epoch, 'library', LIBRARY, 'made_ms', now_ms() }
  for _, counter in ipairs({ 'version', 'queries', 'hits', unpack(COUNTERS) }) do
    header[#header + 1], header[#header + 2] = counter, 0
  end
  for i, field in ipairs(SPEC) do
    header[#header + 1], header[#header + 2] = field, spec[i]
  end
  redis.call('HSET', key, unpack(header))
end

local REGISTER_POOL = { TEXT, TEXT, NUMBER, NUMBER, NUMBER, NUMBER, TEXT }

define('register_pool', WRITES, REGISTER_POOL, function(tag, args)
  local key = tag .. ':pool'
  if redis.call('EXISTS', key) == 0 then make_pool(key, 1, args[7], args) end
  for i, field in ipairs(SPEC) do
    local theirs = redis.call('HGET', key, field)
    if theirs ~= args[i] then
      refuse('POOL_EXISTS', 'its', field, 'is', theirs, 'not', args[i])
    end
  end
  return redis.call('HGET', key, 'run_id')
end)

-- Releases up to `limit` holders of a worker; returns their number.
local function forget_holders(tag, worker, limit)
  local ids = redis.call('ZRANGE', tag .. ':holders:' .. worker, 0, limit - 1)
  for _, id in ipairs(ids) do forget_holder(tag, id) end
  store('ZREM', tag .. ':holders:' .. worker, ids)
  return #ids
end

define('drop_pool', FREES, {}, function(tag)
  redis.call('UNLINK', tag .. ':pool') -- from now on UNKNOWN_POOL
  local budget = DROP_PAGE
  for _, worker in ipairs(redis.call('HKEYS', tag .. ':workers')) do
    budget = budget - forget_holders(tag, worker, budget)
    if budget == 0 then return 1 end
    redis.call('UNLINK', tag .. ':waits:' .. worker)
  end
  local ids = redis.call('ZRANGE', tag .. ':retentions', 0, DROP_PAGE - 1)
  for _, id in ipairs(ids) do redis.call('UNLINK', tag .. ':retention:' .. id) end
  store('ZREM', tag .. ':retentions', ids)
  if #ids == DROP_PAGE then return 1 end
  for _, name in ipairs(OTHER_KEYS) do redis.call('UNLINK', tag .. ':' .. name) end
  return 0
end)

local function require_same(code, worker, field, ours, theirs)
  if ours ~= theirs then refuse(code, field, 'is', ours, 'in the pool,', theirs, 'in', worker) end
end

local REGISTER_WORKER = { TEXT, TEXT, NUMBER, NUMBER, NUMBER, NUMBER }

define('register_worker', WRITES, REGISTER_WORKER, function(tag, args)
  local pool, worker = find_pool(tag), args[1]
  if buried(pool, 'w:' .. worker) then
    refuse('UNKNOWN_WORKER', 'worker', worker, 'was reaped; names are never reused')
  end
  if redis.call('HGET', tag .. ':workers', worker) then require_live(pool, worker) end
  local fields = { 'fingerprint', 'num_blocks', 'block_size', 'block_bytes', 'run_id' }
  local header = redis.call('HMGET', tag .. ':pool', unpack(fields))
  require_same('GEOMETRY_MISMATCH', worker, 'block_size', header[3], args[4])
  require_same('GEOMETRY_MISMATCH', worker, 'num_blocks', header[2], args[3])
  require_same('GEOMETRY_MISMATCH', worker, 'block_bytes', header[4], args[5])
  require_same('FINGERPRINT_MISMATCH', worker, 'fingerprint', header[1], args[2])
  redis.call('HSET', tag .. ':workers', worker, 0)
  redis.call('SREM', tag .. ':missing', worker)
  if args[6] ~= '0' then
    redis.call('HSET', tag .. ':leases', worker, string.format('%d', now_ms() + args[6]))
  end
  save(pool)
  return header[5]
end)

define('fence', FREES, { TEXT }, function(tag, args)
  local pool, worker = find_pool(tag), args[1]
  is_fenced(pool, worker)
  redis.call('HSET', tag .. ':workers', worker, 1)
  end_waits_of(pool, worker)
  if redis.call('SREM', tag .. ':missing', worker) == 1 then
    local id, fields = QUARANTINE .. worker, { 'epoch', 2, 'order', 0, 'cached', 0 }
    redis.call('HSET', tag .. ':holder:' .. id, 'worker', worker, unpack(fields))
    redis.call('ZADD', tag .. ':holders:' .. worker, 0, id)
    pool.top = pool.num_blocks -- no stamp may go unseen
  end
  save(pool)
  return redis.status_reply('OK')
end)

define('leave', FREES, { TEXT }, function(tag, args)
  local pool, worker = find_pool(tag), args[1]
  local num_holders = redis.call('ZCARD', tag .. ':holders:' .. worker)
  local num_waits = redis.call('SCARD', tag .. ':waits:' .. worker)
  if num_holders + num_waits > 0 then
    refuse('NOT_EMPTY', worker, 'has', num_holders, 'holders and', num_waits, 'waiters')
  end
  redis.call('HDEL', tag .. ':workers', worker)
  redis.call('HDEL', tag .. ':leases', worker)
  redis.call('SREM', tag .. ':missing', worker)
  save(pool)
  return redis.status_reply('OK')
end)

define('heartbeat', READS, { TEXT }, function(tag, args)
  local pool, worker = find_pool(tag), args[1]
  if redis.call('SISMEMBER', tag .. ':missing', worker) == 1 then
    refuse('RECOVERING', worker, 'has not said what it holds')
  end
  return { is_fenced(pool, worker) and 1 or 0, unpack(demands_of(pool, worker)) }
end)

define('reap', FREES, { TEXT }, function(tag, args)
  local pool, worker = find_pool(tag), args[1]
  local key, num_references, num_holders = tag .. ':holders:' .. worker, 0, 0
  local left_ms = (redis.call('HGET', tag .. ':leases', worker) or 0) - now_ms()
  if left_ms > 0 then refuse('LEASED', worker, 'may hold blocks for', left_ms, 'ms') end
  redis.call('HDEL', tag .. ':leases', worker)
  if not buried(pool, 'w:' .. worker) then bury(pool, 'w:' .. worker, 0) end
  end_waits_of(pool, worker)
  local last = redis.call('ZREVRANGE', key, 0, 0)[1]
  while last and num_references < REAP_PAGE do
    num_references = num_references + end_holder(pool, find_holder(pool, last))
    num_holders = num_holders + 1
    last = redis.call('ZREVRANGE', key, 0, 0)[1]
  end
  if last then
    redis.call('HSET', tag .. ':workers', worker, 1)
  else
    redis.call('HDEL', tag .. ':workers', worker)
  end
  redis.call('SREM', tag .. ':missing', worker)
  save(pool)
  return { num_holders, last and 1 or 0 }
end)
