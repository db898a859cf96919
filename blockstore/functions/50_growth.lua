-- Allocation and growth. 10_keys.lua lists keys and common codes.
--
-- allocate  holder worker order num_blocks "length ..." hash ...
--           -> [epoch, number of blocks that were cached, "run ...", block ...]
--           The first length is of the prefix that all sequences share, the others are of the
--           sequences' branches behind it. A run is how many hashes of a branch were cached.
--           UNKNOWN_WORKER, FENCED. STALE_HOLDER: released, or at another epoch or worker.
--           WAIT: a waiter has a lower order. OUT_OF_BLOCKS needed available. After WAIT and
--           OUT_OF_BLOCKS the holder is a waiter
-- withdraw  holder -> OK
-- extend    worker (holder epoch have total) ...
--           -> [[demanded holder ...], [error or "", block ...] ...], one for each growth, in the
--           given order; the errors are OUT_OF_BLOCKS and STALE_HOLDER.
--           UNKNOWN_WORKER, FENCED

-- The blocks of the longest run of hashes that is in the index.
local function cached_prefix(pool, hashes)
  local blocks = {}
  for first = 1, #hashes, CHUNK do
    local last = math.min(first + CHUNK - 1, #hashes)
    local found = redis.call('HMGET', pool.tag .. ':index', unpack(hashes, first, last))
    for i = 1, last - first + 1 do
      if not found[i] then return blocks end
      blocks[#blocks + 1] = found[i]
    end
  end
  return blocks
end

-- Divides the hashes into the shared prefix and the branches. INVALID
local function chains_of(lengths, hashes)
  local chains, first = {}, 1
  for length in string.gmatch(lengths, '%S+') do
    if not NUMBER(length) then refuse('INVALID', 'a chain of length', length) end
    local chain, last = {}, first + tonumber(length) - 1
    for i = first, math.min(last, #hashes) do chain[#chain + 1] = hashes[i] end
    chains[#chains + 1], first = chain, last + 1
  end
  if first ~= #hashes + 1 or #chains < 1 or #chains > MAX_BRANCHES + 1 then
    refuse('INVALID', #hashes, 'hashes in chains of', lengths)
  end
  return chains
end

-- The number of different hashes.
local function num_different(hashes)
  local seen, count = {}, 0
  for _, hash in ipairs(hashes) do
    if not seen[hash] then seen[hash], count = true, count + 1 end
  end
  return count
end

-- The cached blocks of the first chain and, if all of it is cached, of each branch, every block
-- once; and the number of cached blocks of each branch.
local function cached_tree(pool, chains)
  local hits, seen, runs, is_whole = {}, {}, {}, true
  for i, chain in ipairs(chains) do
    local run = is_whole and cached_prefix(pool, chain) or {}
    for _, block in ipairs(run) do
      if not seen[block] then seen[block], hits[#hits + 1] = true, block end
    end
    if i == 1 then is_whole = #run == #chain else runs[i - 1] = #run end
  end
  return hits, table.concat(runs, ' ')
end

-- Whether another holder waits with a lower order.
local function is_behind_waiter(pool, id, order)
  local first = redis.call('ZRANGE', pool.tag .. ':waiters', 0, 1, 'WITHSCORES')
  local at = first[1] == id and 3 or 1
  return first[at] and tonumber(first[at + 1]) < order
end

-- The number of blocks that an allocation may take: free and cached blocks, less its cached hits,
-- less the watermark if any block is held.
local function num_available(pool, hits)
  local num_pinned = 0
  for _, refs in ipairs(fetch('HMGET', pool.tag .. ':refs', hits)) do
    if not refs then num_pinned = num_pinned + 1 end
  end
  local watermark = redis.call('HLEN', pool.tag .. ':refs') > 0 and pool.watermark or 0
  return math.max(0, num_free(pool) + num_cached(pool) - num_pinned - watermark)
end

-- Removes the returning waiter of this order: its request asks again, as another holder.
local function take_place(pool, order)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', pool.tag .. ':waiters', order, order)) do
    if buried(pool, 'h:' .. id) then end_wait(pool, id) end
  end
end

-- Adds a waiter and refuses, or returns if the allocation can be served.
local function wait_or_go(pool, want, hits)
  local code, numbers
  local needed, available = want.num_blocks - #hits, num_available(pool, hits)
  if want.has_waiters and is_behind_waiter(pool, want.id, want.order) then
    code, numbers = 'WAIT', 'an earlier request waits'
  elseif needed > available then
    code, numbers = 'OUT_OF_BLOCKS', needed .. ' ' .. available
  else
    return
  end
  start_wait(pool, want.id, want.worker, want.order)
  save(pool)
  refuse(code, numbers)
end

-- Makes the holder; returns the reply to `allocate`.
local function admit(pool, want, hits, runs)
  local num_hits = #hits
  share(pool, hits, want.id) -- first, so that the new ones do not evict them
  local blocks = hits
  for _, block in ipairs(take(pool, want.num_blocks - num_hits, want.id)) do
    blocks[#blocks + 1] = block
  end
  enter(pool, want.id, blocks, 0)
  local fields = {
    'worker', want.worker, 'epoch', 1, 'order', want.order, 'cached', num_hits, 'runs', runs,
  }
  redis.call('HSET', pool.tag .. ':holder:' .. want.id, unpack(fields))
  redis.call('ZADD', pool.tag .. ':holders:' .. want.worker, want.order, want.id)
  for counter, number in pairs({ queries = want.num_hashes, hits = num_hits }) do
    if number > 0 then redis.call('HINCRBY', pool.tag .. ':pool', counter, number) end
  end
  if want.has_waiters then end_wait(pool, want.id) end
  save(pool)
  return answer(blocks, 1, num_hits, runs)
end

local ALLOCATE = { TEXT, TEXT, NUMBER, NUMBER, TEXT, rest = { HASH } }

define('allocate', WRITES, ALLOCATE, function(tag, args)
  local pool = open(tag)
  local want = {
    id = args[1],
    worker = args[2],
    order = tonumber(args[3]),
    num_blocks = tonumber(args[4]),
  }
  local hashes = slice(args, 6)
  local chains = chains_of(args[5], hashes)
  require_distinct(chains[1])
  want.num_hashes = num_different(hashes)
  if want.num_hashes > want.num_blocks then
    refuse('INVALID', want.num_hashes, 'hashes for', want.num_blocks, 'blocks')
  end
  require_live(pool, want.worker)
  if buried(pool, 'h:' .. want.id) then refuse('STALE_HOLDER', want.id, 'was released') end
  local holder = find_holder(pool, want.id)
  if not holder then
    local hits, runs = cached_tree(pool, chains)
    want.has_waiters = redis.call('ZCARD', pool.tag .. ':waiters') > 0
    if want.has_waiters then take_place(pool, want.order) end
    wait_or_go(pool, want, hits)
    return admit(pool, want, hits, runs)
  end
  if holder.epoch ~= 1 or holder.worker ~= want.worker then
    refuse('STALE_HOLDER', want.id, 'is at epoch', holder.epoch, 'of worker', holder.worker)
  end
  local runs = redis.call('HGET', tag .. ':holder:' .. want.id, 'runs') or ''
  local blocks = acquired(pool, want.id, 0, want.num_blocks - 1)
  return answer(blocks, holder.epoch, holder.num_cached, runs)
end)

define('withdraw', FREES, { TEXT }, function(tag, args)
  local pool = open(tag)
  end_wait(pool, args[1])
  save(pool)
  return redis.status_reply('OK')
end)

-- The growths of a call with their holders: by order, then as given. INVALID
local function in_order(pool, args)
  local growths = {}
  for at = 2, #args, 4 do
    if tonumber(args[at + 2]) > tonumber(args[at + 3]) then
      refuse('INVALID', args[at], 'has more blocks than it shall have')
    end
    growths[#growths + 1] = {
      place = #growths + 1,
      holder = find_holder(pool, args[at]) or { id = args[at], order = 0 },
      epoch = tonumber(args[at + 1]),
      have = tonumber(args[at + 2]),
      total = tonumber(args[at + 3]),
    }
  end
  table.sort(growths, function(a, b)
    if a.holder.order ~= b.holder.order then return a.holder.order < b.holder.order end
    return a.place < b.place
  end)
  return growths
end

-- The answer to one growth: its error or "", then its blocks.
local function grow(pool, worker, growth)
  local id = growth.holder.id
  if growth.holder.worker ~= worker or growth.holder.epoch ~= growth.epoch then
    return { 'STALE_HOLDER' }
  end
  local num_acquired = redis.call('LLEN', pool.tag .. ':acquired:' .. id)
  local needed = growth.total - num_acquired
  if needed > 0 then
    local free = num_free(pool)
    if needed > free and needed > free + num_cached(pool) then return { 'OUT_OF_BLOCKS' } end
    local blocks = take(pool, needed, id)
    enter(pool, id, blocks, num_acquired)
    if growth.have == num_acquired then return answer(blocks, '') end
  end
  return answer(acquired(pool, id, growth.have, growth.total - 1), '')
end

-- Demands the last holder in order, unless another demand is outstanding.
local function demand_one(pool)
  for _, id in ipairs(redis.call('SMEMBERS', pool.tag .. ':demands')) do
    if not is_fenced(pool, find_holder(pool, id).worker) then return end
  end
  local last = last_in_order(pool)
  if last then redis.call('SADD', pool.tag .. ':demands', last.id) end
end

local EXTEND = { TEXT, rest = { TEXT, NUMBER, NUMBER, NUMBER } }

define('extend', WRITES, EXTEND, function(tag, args)
  local pool, worker = open(tag), args[1]
  local growths = in_order(pool, args)
  require_live(pool, worker)
  local answers, is_short = {}, false
  for _, growth in ipairs(growths) do
    local grown = grow(pool, worker, growth)
    answers[growth.place + 1] = grown
    is_short = is_short or grown[1] == 'OUT_OF_BLOCKS'
  end
  if is_short then demand_one(pool) end
  save(pool)
  answers[1] = demands_of(pool, worker)
  return answers
end)
