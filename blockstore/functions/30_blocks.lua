-- Helpers that move blocks between states; no registered functions. Their callers have checked all
-- arguments. 10_keys.lua lists the keys.
--
--    [0 ........ next) [next ......... num_blocks)
--     |                 never used: free
--     +- in T:refs                          held
--     +- in T:cached  (and T:hashes)        cached
--     +- in T:kept    (and T:hashes)        cached, of a retained hash
--     +- in T:returned                      free
--
-- In a recovery, blocks from `next` on are not accounted for: a held one is in T:refs, any other in
-- no key.

local function num_free(pool)
  return redis.call('LLEN', pool.tag .. ':returned') + pool.num_blocks - pool.next
end

local function num_cached(pool)
  local num_kept = pool.retained > 0 and redis.call('ZCARD', pool.tag .. ':kept') or 0
  return redis.call('ZCARD', pool.tag .. ':cached') + num_kept
end

-- Evicts the least recently used blocks from the cache and the index, retained ones last.
local function evict(pool, count)
  if pool.retained > 0 then end_expired(pool) end
  local blocks = {}
  for _, order in ipairs({ ':cached', ':kept' }) do
    local popped = redis.call('ZPOPMIN', pool.tag .. order, count - #blocks)
    for i = 1, #popped, 2 do blocks[#blocks + 1] = popped[i] end
    if order == ':kept' then pool.num_more = pool.num_more - #popped / 2 end
    if #blocks == count then break end
  end
  local hashes = fetch('HMGET', pool.tag .. ':hashes', blocks)
  charge_owners(pool, hashes, -1)
  store('HDEL', pool.tag .. ':index', hashes)
  store('HDEL', pool.tag .. ':hashes', blocks)
  return blocks
end

-- Takes `count` blocks with one reference each, of the holder `id`: the last returned, the lowest
-- unused, else evicted.
local function take(pool, count, id)
  if count <= 0 then return {} end
  charge_blocks(pool, tenant_of(id), count)
  local blocks = redis.call('RPOP', pool.tag .. ':returned', count) or {}
  while #blocks < count and pool.next < pool.num_blocks do
    blocks[#blocks + 1] = string.format('%d', pool.next)
    pool.next = pool.next + 1
  end
  if #blocks < count then
    for _, block in ipairs(evict(pool, count - #blocks)) do blocks[#blocks + 1] = block end
  end
  local num_new = store('HSET', pool.tag .. ':refs', pairs_of(blocks, function() return 1 end))
  pool.num_more = pool.num_more + num_new
  return blocks
end

-- Adds a reference of the holder `id` to each block; cached blocks leave the cache.
local function share(pool, blocks, id)
  local refs, counts, unheld = fetch('HMGET', pool.tag .. ':refs', blocks), {}, {}
  for i, block in ipairs(blocks) do
    counts[2 * i - 1], counts[2 * i] = block, (refs[i] or 0) + 1
    if not refs[i] then unheld[#unheld + 1] = block end
  end
  charge_blocks(pool, tenant_of(id), #unheld)
  pool.num_more = pool.num_more + store('HSET', pool.tag .. ':refs', counts)
  store('ZREM', pool.tag .. ':cached', blocks)
  if pool.retained > 0 then
    charge_owners(pool, fetch('HMGET', pool.tag .. ':hashes', unheld), -1)
    pool.num_more = pool.num_more - store('ZREM', pool.tag .. ':kept', blocks)
  end
end

-- Records blocks as a holder's next acquisitions; `num_before`: how many acquisitions it had.
local function enter(pool, id, blocks, num_before)
  store('RPUSH', pool.tag .. ':acquired:' .. id, blocks)
  local numbered = pairs_of(blocks, function(i) return num_before + i - 1 end)
  store('HSET', pool.tag .. ':held:' .. id, numbered)
end

-- Of each hash, which may be false: whether it is retained.
local function are_retained(pool, hashes)
  if pool.retained == 0 then return {} end
  local names = {}
  for i, hash in ipairs(hashes) do names[i] = hash or '' end
  return fetch('HMGET', pool.tag .. ':retained', names)
end

-- Ends the charges of blocks that a holder held last. A quarantine may share blocks with holders of
-- any tenant, which were charged first.
local function end_charges(pool, id, blocks)
  if string.sub(id, 1, #QUARANTINE) ~= QUARANTINE then
    charge_blocks(pool, tenant_of(id), -#blocks)
    return
  end
  for _, payer in ipairs(fetch('HMGET', pool.tag .. ':payers', blocks)) do
    charge_blocks(pool, payer or NO_TENANT, -1)
  end
end

-- Removes a reference of the holder `id` from each block, in this order, and frees the blocks
-- without references.
local function drop(pool, blocks, id)
  local refs = fetch('HMGET', pool.tag .. ':refs', blocks)
  local hashes = fetch('HMGET', pool.tag .. ':hashes', blocks)
  local retained = are_retained(pool, hashes)
  local shared, unused, cached, kept, returned = {}, {}, {}, {}, {}
  for i, block in ipairs(blocks) do
    if tonumber(refs[i]) > 1 then
      shared[#shared + 1], shared[#shared + 2] = block, refs[i] - 1
    else
      unused[#unused + 1] = block
      if tonumber(block) >= pool.next then
        -- not accounted for yet
      elseif hashes[i] then
        pool.clock = pool.clock + 1
        local order = retained[i] and kept or cached
        order[#order + 1], order[#order + 2] = pool.clock, block
        if retained[i] then
          local _, owner = parse_retained(retained[i])
          charge_blocks(pool, owner, 1)
        end
      else
        returned[#returned + 1] = block
      end
    end
  end
  end_charges(pool, id, unused)
  store('HSET', pool.tag .. ':refs', shared)
  pool.num_more = pool.num_more - store('HDEL', pool.tag .. ':refs', unused)
  store('ZADD', pool.tag .. ':cached', cached)
  pool.num_more = pool.num_more + store('ZADD', pool.tag .. ':kept', kept)
  store('RPUSH', pool.tag .. ':returned', returned)
  pool.has_news = pool.has_news or #unused > 0
end

-- The blocks of a map {acquisition number -> block}, from the last acquired to the first.
local function backwards(block_at)
  local numbers, blocks = {}, {}
  for number in pairs(block_at) do numbers[#numbers + 1] = number end
  table.sort(numbers, function(a, b) return a > b end)
  for i, number in ipairs(numbers) do blocks[i] = block_at[number] end
  return blocks
end

-- The blocks that a holder holds now, from the last acquired to the first.
local function held_by(pool, id)
  local entries, block_at = redis.call('HGETALL', pool.tag .. ':held:' .. id), {}
  for i = 1, #entries, 2 do block_at[tonumber(entries[i + 1])] = entries[i] end
  return backwards(block_at)
end

-- The `blocks` that a holder holds, each once, from the last acquired to the first.
local function held_among(pool, id, blocks)
  local numbers, block_at = fetch('HMGET', pool.tag .. ':held:' .. id, blocks), {}
  for i, block in ipairs(blocks) do
    if numbers[i] then block_at[tonumber(numbers[i])] = block end
  end
  return backwards(block_at)
end

-- Removes the three keys of a holder.
local function forget_holder(tag, id)
  redis.call('UNLINK', tag .. ':holder:' .. id, tag .. ':acquired:' .. id, tag .. ':held:' .. id)
end

-- Releases a holder and adds its tombstone; returns the number of its references.
local function end_holder(pool, holder)
  local blocks = held_by(pool, holder.id)
  drop(pool, blocks, holder.id)
  redis.call('ZREM', pool.tag .. ':holders:' .. holder.worker, holder.id)
  redis.call('SREM', pool.tag .. ':demands', holder.id)
  forget_holder(pool.tag, holder.id)
  bury(pool, 'h:' .. holder.id, holder.epoch)
  return #blocks
end
