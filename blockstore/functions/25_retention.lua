-- Retention: prefixes whose blocks are evicted last. 10_keys.lua lists keys and common codes.
--
-- retain         owner name ttl_ms owner_limit pool_limit hash ...
--                -> [leading hashes that are retained, all hashes of the owner, all of the pool]
--                The hashes are a chain, and need not be indexed. Replaces the owner's retention of
--                this name. A limit is the most hashes that may be retained at a time; the owner
--                who is first to retain a hash is charged for it
-- end_retention  owner name -> 1 if there was one, else 0
-- retentions     first limit -> [["owner/name", ms left, hashes, indexed hashes] ...], by end
--
-- A cached block is in T:kept if its hash is retained, and in T:cached otherwise. Both are evicted
-- least recently used first, and T:kept only after T:cached: so a retention never refuses an
-- allocation. Retaining a hash, and the end of its last retention, count as a use of its block.

-- Moves the blocks of hashes, which are retained, from one order of eviction to the end of the
-- other, tails first.
local function move_blocks(pool, hashes, from, to)
  local found, blocks, moved, entries = fetch('HMGET', pool.tag .. ':index', hashes), {}, {}, {}
  for i = #hashes, 1, -1 do
    if found[i] then blocks[#blocks + 1] = found[i] end
  end
  for i, clock in ipairs(fetch('ZMSCORE', pool.tag .. from, blocks)) do
    if clock then
      pool.clock = pool.clock + 1
      moved[#moved + 1] = blocks[i]
      entries[#entries + 1], entries[#entries + 2] = pool.clock, blocks[i]
    end
  end
  local num_moved = store('ZREM', pool.tag .. from, moved)
  store('ZADD', pool.tag .. to, entries)
  pool.num_more = pool.num_more + (to == ':kept' and num_moved or -num_moved)
  charge_owners(pool, fetch('HMGET', pool.tag .. ':hashes', moved), to == ':kept' and 1 or -1)
end

local function charge(pool, owner, number)
  local key = pool.tag .. ':charged'
  if redis.call('HINCRBY', key, owner, number) == 0 then redis.call('HDEL', key, owner) end
  pool.retained = pool.retained + number
end

-- Adds a retention of the leading hashes, as far as there is `room` for those that are not retained
-- yet; returns their number.
local function add_retention(pool, owner, id, hashes, room)
  local key = pool.tag .. ':retained'
  local before, names, values, new = fetch('HMGET', key, hashes), {}, {}, {}
  for i, hash in ipairs(hashes) do
    local count, payer = 0, owner
    if before[i] then
      count, payer = parse_retained(before[i])
    else
      if #new == room then break end
      new[#new + 1] = hash
    end
    names[i], values[i] = hash, string.format('%d %s', count + 1, payer)
  end
  store('HSET', key, pairs_of(names, function(i) return values[i] end))
  store('RPUSH', pool.tag .. ':retention:' .. id, names)
  charge(pool, owner, #new)
  move_blocks(pool, new, ':cached', ':kept')
  return #names
end

-- Ends a retention, if there is one; returns the number of its hashes.
local function remove_retention(pool, id)
  local hashes = redis.call('LRANGE', pool.tag .. ':retention:' .. id, 0, -1)
  local values = fetch('HMGET', pool.tag .. ':retained', hashes)
  local fewer, gone, refunds = {}, {}, {}
  for i, hash in ipairs(hashes) do
    local count, owner = parse_retained(values[i])
    if count > 1 then
      fewer[#fewer + 1], fewer[#fewer + 2] = hash, string.format('%d %s', count - 1, owner)
    else
      gone[#gone + 1] = hash
      refunds[owner] = (refunds[owner] or 0) + 1
    end
  end
  move_blocks(pool, gone, ':kept', ':cached')
  store('HSET', pool.tag .. ':retained', fewer)
  store('HDEL', pool.tag .. ':retained', gone)
  for owner, number in pairs(refunds) do charge(pool, owner, -number) end
  redis.call('UNLINK', pool.tag .. ':retention:' .. id)
  redis.call('ZREM', pool.tag .. ':retentions', id)
  return #hashes
end

-- Ends the retentions whose time has passed. After CHUNK hashes, later calls do the rest.
local function end_expired(pool)
  local now, num_hashes = now_ms(), 0
  while num_hashes < CHUNK do
    local first = redis.call('ZRANGE', pool.tag .. ':retentions', 0, 0, 'WITHSCORES')
    if not first[1] or tonumber(first[2]) > now then return end
    num_hashes = num_hashes + remove_retention(pool, first[1])
  end
end

-- Whether a retention has exactly these hashes: the last hash of a chain tells of all.
local function has_hashes(pool, id, hashes)
  local key = pool.tag .. ':retention:' .. id
  return redis.call('LLEN', key) == #hashes and redis.call('LINDEX', key, -1) == hashes[#hashes]
end

local RETAIN = { TEXT, TEXT, NUMBER, NUMBER, NUMBER, rest = { HASH } }

define('retain', WRITES, RETAIN, function(tag, args)
  local pool, owner, hashes = open(tag), args[1], slice(args, 6)
  require_distinct(hashes)
  local id, num_retained = owner .. '/' .. args[2], #hashes
  end_expired(pool)
  if not has_hashes(pool, id, hashes) then
    remove_retention(pool, id)
    local of_owner = redis.call('HGET', tag .. ':charged', owner) or 0
    local room = math.min(args[4] - of_owner, args[5] - pool.retained)
    num_retained = add_retention(pool, owner, id, hashes, math.max(0, room))
  end
  if num_retained > 0 then
    local ends_ms = string.format('%d', now_ms() + args[3])
    redis.call('ZADD', tag .. ':retentions', ends_ms, id)
  end
  save(pool)
  local of_owner = tonumber(redis.call('HGET', tag .. ':charged', owner)) or 0
  return { num_retained, of_owner, pool.retained }
end)

define('end_retention', FREES, { TEXT, TEXT }, function(tag, args)
  local pool = open(tag)
  local num_hashes = remove_retention(pool, args[1] .. '/' .. args[2])
  save(pool)
  return num_hashes > 0 and 1 or 0
end)

define('retentions', READS, { NUMBER, NUMBER }, function(tag, args)
  find_pool(tag)
  local rows, first, now = {}, tonumber(args[1]), now_ms()
  local key, last = tag .. ':retentions', first + args[2] - 1
  local ends = redis.call('ZRANGE', key, first, last, 'WITHSCORES')
  for i = 1, #ends, 2 do
    local hashes, num_indexed = redis.call('LRANGE', tag .. ':retention:' .. ends[i], 0, -1), 0
    for _, block in ipairs(fetch('HMGET', tag .. ':index', hashes)) do
      if block then num_indexed = num_indexed + 1 end
    end
    rows[#rows + 1] = { ends[i], math.max(0, ends[i + 1] - now), #hashes, num_indexed }
  end
  return rows
end)
