-- Commit, detach, claim and release. 10_keys.lua lists keys and common codes.
--
-- commit     holder epoch (block hash) ... -> [1 if the block is indexed under its hash, else 0]
--            STALE_HOLDER, FENCED. NOT_HELD: a block is not held, or has another hash
-- retract    block hash -> OK
-- detach     holder epoch -> epoch + 1. STALE_HOLDER, FENCED
-- claim      holder epoch worker block ... -> [epoch + 1, order, number of blocks that were cached,
--            number of acquisitions, block ..., block given back ...]: all that a recovery needs.
--            STALE_HOLDER; UNKNOWN_WORKER, FENCED of `worker`. NOT_HELD: the holder does not hold
--            one of the named blocks
-- give_back  holder epoch block ... -> OK. STALE_HOLDER
-- release    holder epoch comes_back -> OK. STALE_HOLDER. `comes_back` is 1 if the request was
--            preempted: the holder becomes a returning waiter, so that the request keeps its order

-- NOT_HELD
local function require_held(pool, id, blocks)
  local numbers = fetch('HMGET', pool.tag .. ':held:' .. id, blocks)
  for i, block in ipairs(blocks) do
    if not numbers[i] then refuse('NOT_HELD', 'block', block, 'is not held by', id) end
  end
end

-- NOT_HELD
local function require_committable(pool, id, blocks, hashes)
  require_held(pool, id, blocks)
  local carried = fetch('HMGET', pool.tag .. ':hashes', blocks)
  for i, block in ipairs(blocks) do
    if carried[i] and carried[i] ~= hashes[i] then
      refuse('NOT_HELD', 'block', block, 'carries another hash')
    end
  end
end

-- Adds each hash that is not indexed yet to the index; returns 1 or 0 for each block.
local function publish(pool, blocks, hashes)
  local indexed = fetch('HMGET', pool.tag .. ':index', hashes)
  local block_of, flags, index, inverse = {}, {}, {}, {}
  for i, block in ipairs(blocks) do
    local first = indexed[i] or block_of[hashes[i]]
    if not first then
      block_of[hashes[i]], first = block, block
      index[#index + 1], index[#index + 2] = hashes[i], block
      inverse[#inverse + 1], inverse[#inverse + 2] = block, hashes[i]
    end
    flags[i] = first == block and 1 or 0
  end
  store('HSET', pool.tag .. ':index', index)
  store('HSET', pool.tag .. ':hashes', inverse)
  return flags
end

local COMMIT = { TEXT, NUMBER, rest = { NUMBER, HASH } }

define('commit', WRITES, COMMIT, function(tag, args)
  local pool, blocks, hashes = open(tag), {}, {}
  for at = 3, #args, 2 do
    blocks[#blocks + 1], hashes[#hashes + 1] = args[at], args[at + 1]
  end
  require_distinct(blocks)
  local holder = holder_of(pool, args[1])
  require_live(pool, holder.worker)
  require_epoch(holder, tonumber(args[2]))
  require_committable(pool, holder.id, blocks, hashes)
  local flags = publish(pool, blocks, hashes)
  save(pool)
  return flags
end)

define('retract', WRITES, { NUMBER, HASH }, function(tag, args)
  local pool, block, hash = open(tag), args[1], args[2]
  if redis.call('HGET', tag .. ':index', hash) ~= block then return redis.status_reply('OK') end
  redis.call('HDEL', tag .. ':index', hash)
  redis.call('HDEL', tag .. ':hashes', block)
  local is_kept = redis.call('ZREM', tag .. ':kept', block) == 1
  if is_kept then
    charge_owners(pool, { hash }, -1)
    pool.num_more = pool.num_more - 1
  end
  if is_kept or redis.call('ZREM', tag .. ':cached', block) == 1 then
    redis.call('RPUSH', tag .. ':returned', block)
    pool.has_news = true
  end
  save(pool)
  return redis.status_reply('OK')
end)

define('detach', WRITES, { TEXT, NUMBER }, function(tag, args)
  local pool, epoch = open(tag), tonumber(args[2])
  local holder = holder_of(pool, args[1])
  require_live(pool, holder.worker)
  local is_sent_again = epoch % 2 == 1 and holder.epoch == epoch + 1
  if not is_sent_again then
    require_epoch(holder, epoch)
    if epoch % 2 == 0 then refuse('STALE_HOLDER', holder.id, 'is detached at epoch', epoch) end
    redis.call('HSET', tag .. ':holder:' .. holder.id, 'epoch', epoch + 1)
    save(pool)
  end
  return epoch + 1
end)

local function all_of(pool, holder, epoch)
  local reply = redis.call('LRANGE', pool.tag .. ':acquired:' .. holder.id, 0, -1)
  local numbers, num_acquired = fetch('HMGET', pool.tag .. ':held:' .. holder.id, reply), #reply
  for i = 1, num_acquired do
    if not numbers[i] then reply[#reply + 1] = reply[i] end
  end
  return answer(reply, epoch, holder.order, holder.num_cached, num_acquired)
end

local CLAIM = { TEXT, NUMBER, TEXT, rest = { NUMBER } }

define('claim', WRITES, CLAIM, function(tag, args)
  local pool, epoch, worker = open(tag), tonumber(args[2]), args[3]
  require_live(pool, worker)
  local holder = holder_of(pool, args[1])
  local blocks = slice(args, 4)
  local has_won = epoch % 2 == 0 and holder.epoch == epoch + 1 and holder.worker == worker
  if not has_won then
    require_epoch(holder, epoch)
    if epoch % 2 == 1 then refuse('STALE_HOLDER', holder.id, 'is running on', holder.worker) end
  end
  require_held(pool, holder.id, blocks)
  if not has_won then
    redis.call('HSET', tag .. ':holder:' .. holder.id, 'epoch', epoch + 1, 'worker', worker)
    local order = redis.call('ZSCORE', tag .. ':holders:' .. holder.worker, holder.id)
    redis.call('ZREM', tag .. ':holders:' .. holder.worker, holder.id)
    redis.call('ZADD', tag .. ':holders:' .. worker, order, holder.id)
    save(pool)
  end
  return all_of(pool, holder, epoch + 1)
end)

local GIVE_BACK = { TEXT, NUMBER, rest = { NUMBER } }

define('give_back', FREES, GIVE_BACK, function(tag, args)
  local pool = open(tag)
  local holder = holder_of(pool, args[1])
  require_epoch(holder, tonumber(args[2]))
  local blocks = held_among(pool, holder.id, slice(args, 3))
  drop(pool, blocks, holder.id)
  store('HDEL', tag .. ':held:' .. holder.id, blocks)
  save(pool)
  return redis.status_reply('OK')
end)

define('release', FREES, { TEXT, NUMBER, FLAG }, function(tag, args)
  local pool, epoch = open(tag), tonumber(args[2])
  if buried(pool, 'h:' .. args[1]) == epoch then return redis.status_reply('OK') end
  local holder = holder_of(pool, args[1])
  require_epoch(holder, epoch)
  end_holder(pool, holder)
  if args[3] == '1' and not is_fenced(pool, holder.worker) then
    start_wait(pool, holder.id, holder.worker, holder.order)
  end
  save(pool)
  return redis.status_reply('OK')
end)
