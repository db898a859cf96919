-- The block store of a pool: its keys, and helpers of all functions.
--
-- Every function gets KEYS[1] = T, the pool's hash tag `{pool}`; every other key begins with it, so
-- that all of a pool's keys are on one node of a Redis Cluster. Blocks are decimal ids, hashes 16
-- raw bytes, orders integers below 2^53 (a score holds them exactly).
--
--   T:pool                 HASH  the header, which exists as long as the pool
--                                model fingerprint num_blocks block_size block_bytes watermark
--                                                the arguments of register_pool
--                                run_id          of the server when the pool was made
--                                epoch           ledger epoch: 1 + the number of recoveries
--                                made_ms         TIME when the ledger was made
--                                recovering      1 during a recovery, else absent
--                                top             in a recovery: account for all blocks below
--                                next            lowest block never used (the bump counter)
--                                clock           the last score in T:cached and T:kept
--                                version         raised by every call that changes the pool
--                                queries, hits   prefix blocks looked up and found
--                                retained        the number of hashes in T:retained
--                                starts          when uses of blocks began: 22_shares.lua
--                                library         the library of functions that may call on it
--   T:returned             LIST  free blocks that were used before; the last is taken first
--   T:cached               ZSET  block -> clock when its last holder left; the lowest is evicted
--   T:kept                 ZSET  the same for blocks whose hash is retained; evicted after T:cached
--   T:refs                 HASH  block -> number of its holders; absent if it has none
--   T:index                HASH  prefix hash -> block
--   T:hashes               HASH  block -> its prefix hash; the inverse of T:index
--   T:retained             HASH  prefix hash -> "retentions owner": how many it has, who is charged
--   T:charged              HASH  owner -> the hashes for which it is charged
--   T:retentions           ZSET  "owner/name" -> the end of the retention, in ms of TIME
--   T:retention:<o>/<n>    LIST  its prefix hashes, in the order of their chain
--   T:shares               HASH  tenant -> its used blocks; tenant/ -> its part of `starts`
--   T:payers               HASH  block -> the tenant that is charged, of those that were held
--                              before a recovery; only a quarantine asks
--   T:workers              HASH  worker -> 0, or 1 if it is fenced
--   T:leases               HASH  a member on another host -> the end of its lease, in ms of TIME
--   T:missing              SET   in a recovery: workers that have not reported yet
--   T:holders:<worker>     ZSET  holder -> order
--   T:waits:<worker>       SET   holders for which this worker waits
--   T:holder:<holder>      HASH  worker, epoch, order; of its allocation: cached (blocks found),
--                              runs (of each branch)
--   T:acquired:<holder>    LIST  every block it ever got; an index is an acquisition number
--   T:held:<holder>        HASH  block -> its last acquisition number; only what it holds now
--   T:waiters              ZSET  holder -> order
--   T:waiting              HASH  holder -> the worker that waits for its blocks
--   T:demands              SET   holders that must be preempted
--   T:tombs                HASH  h:<holder> or w:<worker> -> "epoch until_ms"
--   T:graves               LIST  the fields of T:tombs, oldest first
--   T:room                 shard channel on which freed blocks, and waits that ended, are announced
--   T:arrivals             ZSET  of the registry (T is `{quire}`): "arrivals" -> the last one
--
-- A function is defined with its signature, and checks its arguments against it first.
--
-- An error reply is `CODE text`; OUT_OF_BLOCKS is followed by needed and available. A function
-- checks everything before its first write, since an error half-way is not rolled back.
--
-- Common codes: UNKNOWN_POOL     every function but register_pool, drop_pool and recover
--               RECOVERING       the ledger was lost and is not rebuilt yet; every function that
--                                changes the pool, except 80_recovery.lua, register_worker, fence,
--                                leave, reap and drop_pool
--               UNKNOWN_WORKER   the worker is not on the pool
--               FENCED           the worker may only release
--               STALE_HOLDER     released, never allocated, or at another epoch
--               INVALID          the arguments do not match the function's signature

local MAX_BRANCHES = 100 -- of one allocation
local CHUNK = 1000 -- arguments of a variadic call: even, and well below the limit of unpack
local TOMBSTONE_MS = 600 * 1000

local function refuse(code, ...)
  error({ refusal = code .. ' ' .. table.concat({ ... }, ' ') })
end

-- The kinds of arguments. Numbers are below 2^53 and have one spelling, since block ids are keys.
local function TEXT(value) return #value > 0 and #value <= 1024 end
local function NUMBER(value)
  return #value <= 16 and (value == '0' or string.find(value, '^[1-9]%d*$') ~= nil)
    and tonumber(value) < 2 ^ 53
end
local function HASH(value) return #value == 16 end
local function FLAG(value) return value == '0' or value == '1' end

-- Checks the arguments against a signature { kind ... }; behind it, the group `rest` = { kind ... }
-- may follow any number of times. INVALID.
local function require_arguments(signature, args)
  local rest = signature.rest or {}
  local num_more = #args - #signature
  if num_more < 0 or (#rest == 0 and num_more > 0) or (#rest > 0 and num_more % #rest > 0) then
    refuse('INVALID', #args, 'arguments')
  end
  for i, value in ipairs(args) do
    local is_one = signature[i] or rest[(i - #signature - 1) % #rest + 1]
    if not is_one(value) then refuse('INVALID', 'argument', i) end
  end
end

-- INVALID: a value occurs twice.
local function require_distinct(values)
  local seen = {}
  for _, value in ipairs(values) do
    if seen[value] then refuse('INVALID', 'something is named twice') end
    seen[value] = true
  end
end

local LIBRARY = 'quire_v9'

local clock_ms -- the server's clock in this call; nil until it is read

-- Registers `body(tag, args)` as quire_v9_<name>; a refusal in it becomes an error reply.
local function define(name, flags, signature, body)
  local function call(keys, args)
    if #keys ~= 1 or not string.find(keys[1], '^{[^{}]+}$') then refuse('INVALID', 'keys') end
    require_arguments(signature, args)
    clock_ms = nil
    return body(keys[1], args)
  end
  redis.register_function({
    function_name = LIBRARY .. '_' .. name,
    flags = flags,
    callback = function(keys, args)
      local done, reply = pcall(call, keys, args)
      if done then return reply end
      if type(reply) == 'table' and reply.refusal then return redis.error_reply(reply.refusal) end
      error(reply)
    end,
  })
end

local READS, WRITES, FREES = { 'no-writes' }, {}, { 'allow-oom' }

-- Calls a command with many arguments in chunks, and returns all values.
local function fetch(command, key, arguments)
  local values = {}
  for first = 1, #arguments, CHUNK do
    local last = math.min(first + CHUNK - 1, #arguments)
    local chunk = redis.call(command, key, unpack(arguments, first, last))
    for i = 1, last - first + 1 do values[first - 1 + i] = chunk[i] end
  end
  return values
end

-- Calls a command with many arguments in chunks, and returns the sum of the replies; without
-- arguments it does nothing.
local function store(command, key, arguments)
  local sum = 0
  for first = 1, #arguments, CHUNK do
    local last = math.min(first + CHUNK - 1, #arguments)
    sum = sum + redis.call(command, key, unpack(arguments, first, last))
  end
  return sum
end

-- {field, value_of(1), field, value_of(2) ...}
local function pairs_of(fields, value_of)
  local arguments = {}
  for i, field in ipairs(fields) do
    arguments[2 * i - 1], arguments[2 * i] = field, value_of(i)
  end
  return arguments
end

local function slice(values, first)
  local rest = {}
  for i = first, #values do rest[i - first + 1] = values[i] end
  return rest
end

local COUNTERS = { 'next', 'clock', 'top', 'retained', 'starts' }
local HEADER = {
  'num_blocks', 'watermark', 'recovering', 'version', 'next', 'clock', 'top', 'retained', 'starts',
}

-- Reads the pool's header for one call; `save` writes the changes back. UNKNOWN_POOL.
local function find_pool(tag)
  local header = redis.call('HMGET', tag .. ':pool', unpack(HEADER))
  if not header[1] then refuse('UNKNOWN_POOL', 'pool', tag, 'is not there') end
  local next, clock, top = tonumber(header[5]), tonumber(header[6]), tonumber(header[7])
  local retained, starts = tonumber(header[8]), tonumber(header[9])
  return {
    tag = tag,
    num_blocks = tonumber(header[1]),
    watermark = tonumber(header[2]),
    recovering = header[3] ~= false,
    version = tonumber(header[4]),
    next = next,
    clock = clock,
    top = top,
    retained = retained,
    starts = starts,
    before = { next = next, clock = clock, top = top, retained = retained, starts = starts },
    charges = {}, -- tenant -> change of its used blocks by this call
    num_more = 0, -- change of all used blocks by this call
    has_news = false, -- blocks were freed or waits ended
  }
end

-- UNKNOWN_POOL, RECOVERING.
local function open(tag)
  local pool = find_pool(tag)
  if pool.recovering then refuse('RECOVERING', 'pool', tag, 'is not whole again yet') end
  return pool
end

local function now_ms()
  if not clock_ms then
    local time = redis.call('TIME')
    clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return clock_ms
end

-- The last epoch in the tombstone of a name ("h:<holder>", "w:<worker>"); false if there is none.
local function buried(pool, name)
  local tomb = redis.call('HGET', pool.tag .. ':tombs', name)
  if not tomb then return false end
  local epoch, until_ms = string.match(tomb, '^(%d+) (%d+)$')
  return tonumber(until_ms) > now_ms() and tonumber(epoch)
end

-- Adds a tombstone to a name without one. Each call removes up to two expired ones, so that their
-- number stays bounded.
local function bury(pool, name, epoch)
  local now = now_ms()
  local tombs, graves = pool.tag .. ':tombs', pool.tag .. ':graves'
  for _ = 1, 2 do
    local oldest = redis.call('LINDEX', graves, 0)
    if not oldest or buried(pool, oldest) then break end
    redis.call('HDEL', tombs, oldest)
    redis.call('LPOP', graves)
  end
  redis.call('HSET', tombs, name, string.format('%d %d', epoch, now + TOMBSTONE_MS))
  redis.call('RPUSH', graves, name)
end
