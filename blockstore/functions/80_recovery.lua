-- Recovery of a pool's ledger that the server lost. 10_keys.lua lists keys and common codes.
--
-- recover   epoch run_id model fingerprint num_blocks block_size block_bytes watermark worker ...
--           -> OK. POOL_EXISTS: the pool has another ledger epoch or run_id
-- reassert  worker last(0|1) waits (waiter order released_epoch)...
--           (holder epoch order cached acquired given_back block... block...)...
--           -> [missing worker ...]. UNKNOWN_WORKER: the name was reaped. FENCED.
--           `released_epoch` is 0 unless it is a returning waiter; `acquired` and `given_back` are
--           the numbers of blocks that follow. A long report takes several calls; after the last
--           one the worker is no longer missing
-- restore   first (content rank)... -> OK. RECOVERING: workers are missing, or there is a gap.
--           The content is a prefix hash, "p" (private) or "" (never used)
-- reopen    -> OK. RECOVERING
--
--    [0 ........ next)[next ........ num_blocks)
--     accounted for    in T:refs if held, in no other key
--
-- A quarantine is the holder T:holder:quarantine:<worker>, detached at epoch 2.

local RECOVER = { NUMBER, TEXT, TEXT, TEXT, NUMBER, NUMBER, NUMBER, NUMBER, rest = { TEXT } }

define('recover', WRITES, RECOVER, function(tag, args)
  local key = tag .. ':pool'
  local epoch, run_id = unpack(redis.call('HMGET', key, 'epoch', 'run_id'))
  if epoch == args[1] and run_id == args[2] then return redis.status_reply('OK') end
  if epoch then refuse('POOL_EXISTS', 'at ledger epoch', epoch, 'of run', run_id) end
  make_pool(key, args[1], args[2], slice(args, 3))
  redis.call('HSET', key, 'recovering', 1, 'clock', args[5])
  local workers = slice(args, 9)
  store('HSET', tag .. ':workers', pairs_of(workers, function() return 0 end))
  store('SADD', tag .. ':missing', workers)
  return redis.status_reply('OK')
end)

-- Adds a reported holder, unless it is known with the same epoch or a higher one.
local function enter_asserted(pool, worker, id, epoch, order, num_cached, blocks, given_back)
  local known = find_holder(pool, id)
  if known and known.epoch >= epoch then return end
  if known then
    drop(pool, held_by(pool, id), id)
    redis.call('ZREM', pool.tag .. ':holders:' .. known.worker, id)
    forget_holder(pool.tag, id)
  end
  enter(pool, id, blocks, 0)
  store('HDEL', pool.tag .. ':held:' .. id, given_back)
  local held = held_by(pool, id)
  share(pool, held, id)
  local tenant = tenant_of(id)
  store('HSET', pool.tag .. ':payers', pairs_of(held, function() return tenant end))
  for _, block in ipairs(held) do pool.top = math.max(pool.top, tonumber(block) + 1) end
  local fields = { 'worker', worker, 'epoch', epoch, 'order', order, 'cached', num_cached }
  redis.call('HSET', pool.tag .. ':holder:' .. id, unpack(fields))
  redis.call('ZADD', pool.tag .. ':holders:' .. worker, order, id)
end

-- Reads arguments one after the other. INVALID: one is missing or wrong.
local function reader(args, at)
  return {
    is_over = function() return at > #args end,
    next = function(is_one)
      local value = args[at]
      if not value or not is_one(value) then refuse('INVALID', 'argument', at) end
      at = at + 1
      return value
    end,
  }
end

local function next_blocks(arguments, count)
  local blocks = {}
  for i = 1, count do blocks[i] = arguments.next(NUMBER) end
  return blocks
end

-- Parses a worker's report to { waits, holders }: lists of arguments for start_wait and
-- enter_asserted. INVALID.
local function parse(args)
  local arguments, waits, holders = reader(args, 3), {}, {}
  local function number() return tonumber(arguments.next(NUMBER)) end
  for i = 1, number() do waits[i] = { arguments.next(TEXT), number(), number() } end
  while not arguments.is_over() do
    local facts = { arguments.next(TEXT), number(), number(), number() }
    local num_acquired, num_given_back = number(), number()
    facts[5] = next_blocks(arguments, num_acquired)
    facts[6] = next_blocks(arguments, num_given_back)
    holders[#holders + 1] = facts
  end
  return waits, holders
end

local function ANY() return true end

define('reassert', WRITES, { TEXT, FLAG, NUMBER, rest = { ANY } }, function(tag, args)
  local waits, holders = parse(args)
  local pool, worker = find_pool(tag), args[1]
  if buried(pool, 'w:' .. worker) then
    refuse('UNKNOWN_WORKER', 'worker', worker, 'was reaped; names are never reused')
  end
  if not pool.recovering then
    require_live(pool, worker)
    return {}
  end
  if redis.call('HGET', tag .. ':workers', worker) then require_live(pool, worker) end
  redis.call('HSET', tag .. ':workers', worker, 0)
  for _, wait in ipairs(waits) do
    local id, order, released_epoch = unpack(wait)
    start_wait(pool, id, worker, order)
    local name = 'h:' .. id
    if released_epoch > 0 and not buried(pool, name) then bury(pool, name, released_epoch) end
  end
  for _, facts in ipairs(holders) do enter_asserted(pool, worker, unpack(facts)) end
  if args[2] == '1' then redis.call('SREM', tag .. ':missing', worker) end
  save(pool)
  local missing = redis.call('SMEMBERS', tag .. ':missing')
  table.sort(missing)
  return missing
end)

-- RECOVERING: a worker has not reported.
local function require_all_heard(pool)
  local missing = redis.call('SMEMBERS', pool.tag .. ':missing')
  if #missing > 0 then refuse('RECOVERING', 'missing are', unpack(missing)) end
end

local function quarantines(pool)
  local holders = {}
  for _, worker in ipairs(redis.call('HKEYS', pool.tag .. ':workers')) do
    holders[#holders + 1] = find_holder(pool, QUARANTINE .. worker)
  end
  return holders
end

local function quarantine(pool, holders, block)
  for _, holder in ipairs(holders) do
    if redis.call('HINCRBY', pool.tag .. ':refs', block, 1) == 1 then
      redis.call('HDEL', pool.tag .. ':payers', block)
      charge_blocks(pool, NO_TENANT, 1)
      pool.num_more = pool.num_more + 1
    end
    enter(pool, holder.id, { block }, redis.call('LLEN', pool.tag .. ':acquired:' .. holder.id))
  end
end

-- Accounts for the next block.
local function account(pool, content, rank)
  local block = string.format('%d', pool.next)
  pool.next = pool.next + 1
  local indexes = #content == 16 and redis.call('HSETNX', pool.tag .. ':index', content, block) == 1
  if indexes then redis.call('HSET', pool.tag .. ':hashes', block, content) end
  if redis.call('HEXISTS', pool.tag .. ':refs', block) == 1 then return end
  if indexes then
    redis.call('ZADD', pool.tag .. ':cached', rank, block)
  else
    redis.call('RPUSH', pool.tag .. ':returned', block)
  end
end

local function CONTENT(value) return value == '' or value == 'p' or HASH(value) end
local RESTORE = { NUMBER, rest = { CONTENT, NUMBER } }

define('restore', WRITES, RESTORE, function(tag, args)
  local pool, first = find_pool(tag), tonumber(args[1])
  if not pool.recovering then return redis.status_reply('OK') end
  require_all_heard(pool)
  if first > pool.next then refuse('RECOVERING', 'blocks from', pool.next, 'on are missing') end
  local holders = quarantines(pool)
  for at = 2 + 2 * (pool.next - first), #args, 2 do
    if args[at] == 'p' then quarantine(pool, holders, string.format('%d', pool.next)) end
    account(pool, args[at], tonumber(args[at + 1]))
  end
  save(pool)
  return redis.status_reply('OK')
end)

define('reopen', WRITES, {}, function(tag)
  local pool = find_pool(tag)
  if not pool.recovering then return redis.status_reply('OK') end
  require_all_heard(pool)
  if pool.next < pool.top then
    refuse('RECOVERING', 'blocks', pool.next, 'to', pool.top - 1, 'may be held')
  end
  pool.top, pool.has_news = 0, true
  save(pool)
  if #quarantines(pool) == 0 then redis.call('UNLINK', tag .. ':payers') end
  redis.call('HDEL', tag .. ':pool', 'recovering')
  return redis.status_reply('OK')
end)
